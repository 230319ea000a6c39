"""Small tokenizers of the kinds that models bring."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# A template as Llama 2 and Mistral have it: it writes the BOS token itself.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def _finished(tokenizer):
    tokenizer.add_special_tokens(SPECIALS)
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.Sequence(
        [
            *([tokenizer.post_processor] if tokenizer.post_processor else []),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)]),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATE,
    )


def unigram_with_byte_fallback():
    """As SentencePiece models: a dummy space in front, bytes for what the vocabulary lacks."""
    pieces = [*SPECIALS, *BYTES, "▁", *"abcdehlorw.,!é", "▁hello", "▁w", "lo", "or", "ld", "▁é"]
    vocab = [(piece, -float(rank)) for rank, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _finished(tokenizer)


def bpe_with_byte_fallback():
    """As Llama 2 and Mistral 7B."""
    singles = ["▁", *"abcdehlorw.,!é"]
    merges = [("h", "e"), ("l", "o"), ("o", "r"), ("▁", "w"), ("▁", "he"), ("l", "d")]
    pieces = [*SPECIALS, *BYTES, *singles, *("".join(pair) for pair in merges)]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _finished(tokenizer)


def byte_level():
    """As Qwen, Llama 3 and GPT-2: every byte is a letter of the vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("Ġ", "w"), ("l", "o"), ("ð", "Ł"), ("Ã", "©"), ("o", "r")]
    pieces = [*SPECIALS, *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _finished(tokenizer)


KINDS = {
    "unigram with byte fallback": unigram_with_byte_fallback,
    "BPE with byte fallback": bpe_with_byte_fallback,
    "byte level": byte_level,
}
