"""When a request ends, and what its text then is."""

from __future__ import annotations

import json
import shutil

import pytest
from llm_testing import VOCAB_SIZE, greedy, start, write_tiny_model

from engine.sampling_params import SamplingParams
from engine.text.detokenize import IncrementalDetokenizer, decode_output

PROMPT = [11, 12, 13]


def letter(token_id):
    return chr(0x100 + token_id)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose tokenizer writes one letter per token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    vocab = {letter(token_id): token_id for token_id in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=letter(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}",
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def free_run(folder):
    """What the model says if nothing stops it: 12 tokens, at first no two of them equal."""
    with start(folder) as llm:
        tokens = list(llm.generate([PROMPT], greedy(12), use_tqdm=False)[0].outputs[0].token_ids)
    assert len(set(tokens[:6])) == 6
    return tokens


def run(folder, params, **options):
    with start(folder, **options) as llm:
        return llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0]


def with_eos(folder, tmp_path, ids, generation_ids):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "eos_token_id": ids}))
    generation = {"eos_token_id": generation_ids}
    (copy / "generation_config.json").write_text(json.dumps(generation))
    return str(copy)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_eos_id_of_every_source_stops(
    folder, free_run, tmp_path, asynchronous
):  # BUG-B22, BUG-C48
    model = with_eos(folder, tmp_path, [free_run[4]], [free_run[2], 258])
    params = SamplingParams(temperature=0, max_tokens=12)
    output = run(model, params, async_scheduling=asynchronous)
    assert list(output.token_ids) == free_run[:3]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.text == "".join(map(letter, free_run[:2]))  # the EOS has no text


def test_ignore_eos_ignores_all_of_them(folder, free_run, tmp_path):  # BUG-C48
    model = with_eos(folder, tmp_path, [free_run[4]], [free_run[2]])
    output = run(model, greedy(12))
    assert list(output.token_ids) == free_run
    assert output.finish_reason == "length"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_eos_is_drawn_before_min_tokens(folder, free_run, tmp_path, asynchronous):  # BUG-C48
    model = with_eos(folder, tmp_path, [free_run[2]], [free_run[0]])
    params = SamplingParams(temperature=0, max_tokens=12, min_tokens=3)
    output = run(model, params, async_scheduling=asynchronous)
    banned = {free_run[2], free_run[0]}
    assert not banned & set(output.token_ids[:3])
    assert len(output.token_ids) >= 4 or output.finish_reason == "length"


def test_a_stop_token_ends_the_output_and_stays_in_the_ids_only(folder, free_run):  # BUG-C51
    params = greedy(12, stop_token_ids=[free_run[3]])
    output = run(folder, params)
    assert list(output.token_ids) == free_run[:4]
    assert (output.finish_reason, output.stop_reason) == ("stop", free_run[3])
    assert output.text == "".join(map(letter, free_run[:3]))
    kept = run(folder, greedy(12, stop_token_ids=[free_run[3]], include_stop_str_in_output=True))
    assert kept.text == "".join(map(letter, free_run[:4]))


def test_a_stop_at_the_last_allowed_token_is_a_stop(folder, free_run):  # P-A8
    output = run(folder, greedy(4, stop_token_ids=[free_run[3]]))
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stop_string_across_tokens_is_removed(folder, free_run, asynchronous):  # BUG-C51
    stop = letter(free_run[2]) + letter(free_run[3])
    output = run(folder, greedy(12, stop=[stop]), async_scheduling=asynchronous)
    assert list(output.token_ids) == free_run[:4]
    assert output.text == "".join(map(letter, free_run[:2]))
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_a_stop_string_counts_only_after_min_tokens(folder, free_run):  # BUG-C49
    stop = letter(free_run[1])
    output = run(folder, greedy(12, stop=[stop], min_tokens=5))
    assert len(output.token_ids) > 5


def test_streamed_text_never_takes_back_what_it_showed(folder, free_run):
    stop = letter(free_run[4]) + letter(free_run[5])
    shown = ""
    with start(folder) as llm:
        for output in llm.stream([PROMPT], greedy(12, stop=[stop])):
            assert output.outputs[0].text.startswith(shown)
            shown = output.outputs[0].text
    assert shown == "".join(map(letter, free_run[:4]))


def test_text_and_chat_prompts_become_ids(folder, free_run):
    text = "".join(map(letter, PROMPT))
    with start(folder) as llm:
        from_text = llm.generate(text, greedy(12), use_tqdm=False)[0]
        from_dict = llm.generate({"prompt": text}, greedy(12), use_tqdm=False)[0]
        messages = [{"role": "user", "content": text}]
        from_chat, second = llm.chat([messages, messages], greedy(12), use_tqdm=False)
        one_chat = llm.chat(messages, greedy(12), use_tqdm=False)
    assert len(one_chat) == 1
    for output in (from_text, from_dict, from_chat, second, one_chat[0]):
        assert list(output.prompt_token_ids) == PROMPT
        assert output.prompt == text
        assert list(output.outputs[0].token_ids) == free_run
        assert output.outputs[0].text == "".join(map(letter, free_run))


class ByteTokenizer:
    """Every token is one byte, so that characters are split between tokens."""

    def decode(self, token_ids, *, skip_special_tokens):
        return bytes(token_ids).decode("utf-8", errors="replace")


def test_characters_split_between_tokens_appear_whole():
    text = "aé漢🙂b"
    detokenizer = IncrementalDetokenizer(ByteTokenizer())
    seen = []
    for byte in text.encode():
        detokenizer.append(byte)
        seen.append(detokenizer.text)
    assert seen[-1] == text
    assert not any("�" in part for part in seen)


def test_bytes_that_never_become_a_character_show_at_the_end():
    detokenizer = IncrementalDetokenizer(ByteTokenizer())
    for byte in "a漢".encode()[:-1]:
        detokenizer.append(byte)
    assert detokenizer.text == "a"
    assert detokenizer.finish(stopped_by_token=False) == "a�"


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["a", ",b", ",c"], ["b,c"], "a,"),  # BUG-C51: across pieces
        (["Answer\n\n"], ["\n"], "Answer"),  # BUG-C51: the first match counts
        (["xaby", "z"], ["y", "ab"], "x"),  # the earliest of several stops
        (["aa", "a"], ["aaa"], ""),
    ],
)
def test_the_first_stop_string_cuts_the_text(pieces, stops, expected):
    class Pieces:
        def decode(self, token_ids, *, skip_special_tokens):
            return "".join(pieces[token_id] for token_id in token_ids)

    detokenizer = IncrementalDetokenizer(Pieces(), stops)
    assert any(detokenizer.append(place) for place in range(len(pieces)))  # up to the first
    assert detokenizer.text == expected
    assert detokenizer.finish(stopped_by_token=False) == expected


def test_a_stop_string_that_ended_before_min_tokens_does_not_count_later():
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), ["b"], min_tokens=3)
    assert [detokenizer.append(byte) for byte in b"abacab"] == [False] * 5 + [True]
    assert detokenizer.text == "abaca"


def test_whole_outputs_leave_out_the_token_that_ended_them():
    assert decode_output(ByteTokenizer(), list(b"abc"), True) == "ab"
    assert decode_output(ByteTokenizer(), list(b"abc"), True, include_stop=True) == "abc"
    assert decode_output(ByteTokenizer(), list(b"abc"), False) == "abc"
