"""Streamed text never contradicts later text, and ends as decoding once does."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_testing import KINDS

from engine.text.detokenize import (
    IncrementalDetokenizer,
    byte_token_ids,
    decode_output,
    prompt_context,
)

LETTERS = "ab hello wor. é漢😀🙂\u0301\u200dk,!\n"
TEXTS = st.text(st.sampled_from(LETTERS), max_size=24) | st.text(max_size=8)


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def tokenizer(request):
    made = request.param()
    made.clean_up_tokenization_spaces = False
    return made


def stream(tokenizer, ids, context=(), **options):
    """All texts shown on the way, and the final one."""
    detokenizer = IncrementalDetokenizer(tokenizer, context=context, **options)
    shown = []
    for token_id in ids:
        stopped = detokenizer.append(token_id)
        shown.append(detokenizer.stable_text())
        if stopped:
            break
    return shown, detokenizer.finish(stopped_by_token=False), detokenizer


def check(tokenizer, ids, context, skip):
    shown, final, _ = stream(tokenizer, ids, context, skip_special_tokens=skip)
    whole = tokenizer.decode([*context, *ids], skip_special_tokens=skip)
    before = tokenizer.decode([*context], skip_special_tokens=skip) if context else ""
    assert final == whole[len(before) :]
    for early, later in pairwise([*shown, final]):
        assert later.startswith(early)


@settings(deadline=None, max_examples=150)
@given(text=TEXTS, prompt=TEXTS, cut=st.integers(0, 30), skip=st.booleans())
def test_random_texts(tokenizer, text, prompt, cut, skip):
    """Also such as `max_tokens` has cut within a character."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    context = prompt_context(tokenizer, tokenizer.encode(prompt), byte_token_ids(tokenizer), skip)
    check(tokenizer, ids[: len(ids) - cut % 4], context, skip)


@settings(deadline=None, max_examples=150)
@given(data=st.data(), skip=st.booleans())
def test_random_tokens_that_are_no_text(tokenizer, data, skip):
    some = st.integers(0, len(tokenizer) - 1)
    ids = data.draw(st.lists(some, max_size=40))
    prompt = data.draw(st.lists(some, max_size=8))
    context = prompt_context(tokenizer, prompt, byte_token_ids(tokenizer), skip)
    check(tokenizer, ids, context, skip)


@settings(deadline=None, max_examples=150)
@given(text=TEXTS, stop=st.text(st.sampled_from(LETTERS), min_size=1, max_size=4))
def test_a_stop_string_fires_with_the_token_that_completes_it(tokenizer, text, stop):
    ids = tokenizer.encode(text + stop + "a", add_special_tokens=False)
    texts = [
        tokenizer.decode(ids[:end], skip_special_tokens=True) for end in range(1, len(ids) + 1)
    ]
    complete = [part for part in texts if stop in part]
    if not complete or "\ufffd" in stop:
        return
    end = texts.index(complete[0]) + 1
    shown, final, detokenizer = stream(tokenizer, ids, stop_strings=[stop])
    assert detokenizer.stop_string == stop
    assert final == complete[0][: complete[0].index(stop)]
    assert len(shown) == end
    assert all(final.startswith(part) for part in shown)


def test_three_emoji_of_twelve_byte_tokens():
    tokenizer = KINDS["BPE with byte fallback"]()
    ids = tokenizer.encode("a😀🙂😀.", add_special_tokens=False)
    assert sum(token_id in byte_token_ids(tokenizer) for token_id in ids) == 12
    shown, final, _ = stream(tokenizer, ids)
    assert final == "a😀🙂😀."
    assert not any("\ufffd" in part for part in shown)
    _, final, detokenizer = stream(tokenizer, ids, stop_strings=["🙂"])
    assert (final, detokenizer.stop_string) == ("a😀", "🙂")


def test_the_space_between_prompt_and_output_is_kept():
    tokenizer = KINDS["BPE with byte fallback"]()
    prompt = tokenizer.encode("hello")
    output = tokenizer.encode("hello world", add_special_tokens=False)[-3:]
    assert tokenizer.decode(output) == "world"
    context = prompt_context(tokenizer, prompt, byte_token_ids(tokenizer))
    assert decode_output(tokenizer, output, False, context=context) == " world"
    shown, final, _ = stream(tokenizer, output, context)
    assert (shown[-1], final) == (" world", " world")


def test_a_long_run_of_bytes_is_not_decoded_again_with_every_token():
    tokenizer = KINDS["BPE with byte fallback"]()
    calls = []

    class Counting:
        def decode(self, token_ids, *, skip_special_tokens):
            calls.append(len(token_ids))
            return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    detokenizer = IncrementalDetokenizer(Counting(), byte_ids=byte_token_ids(tokenizer))
    for token_id in tokenizer.encode("漢" * 300 + ".", add_special_tokens=False):
        detokenizer.append(token_id)
    assert detokenizer.text == "漢" * 300 + "."
    assert sum(calls) < 2000


def test_the_window_stays_short():
    tokenizer = KINDS["byte level"]()
    longest = []

    class Counting:
        def decode(self, token_ids, *, skip_special_tokens):
            longest.append(len(token_ids))
            return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    detokenizer = IncrementalDetokenizer(Counting())
    for token_id in tokenizer.encode("hello wor " * 60, add_special_tokens=False):
        detokenizer.append(token_id)
    assert max(longest) < 24
