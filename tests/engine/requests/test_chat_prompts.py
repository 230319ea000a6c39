"""Chat messages become the ids that the model was trained on, or are refused by name."""

from __future__ import annotations

import pytest
from tokenizer_testing import KINDS

from engine.core.errors import InputError
from engine.requests.prompts import to_token_prompt

VOCAB_SIZE = 1000


def chat_ids(tokenizer, messages):
    return list(to_token_prompt(messages, tokenizer, VOCAB_SIZE, 0).token_ids)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_a_template_that_writes_the_bos_token_gives_one(kind):
    """The tokenizer adds one too, as those of Llama and Mistral do."""
    tokenizer = kind()
    messages = [{"role": "user", "content": "hello"}]
    ids = chat_ids(tokenizer, messages)
    bos = tokenizer.bos_token_id
    assert ids.count(bos) == 1
    assert ids[0] == bos
    expected = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ids == expected
    plain = to_token_prompt("hello", tokenizer, VOCAB_SIZE, 0)
    assert list(plain.token_ids) == tokenizer.encode("hello")
    assert plain.token_ids[0] == bos


def test_text_parts_are_joined():
    tokenizer = KINDS["byte level"]()
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    joined = chat_ids(tokenizer, [{"role": "user", "content": parts}])
    assert joined == chat_ids(tokenizer, [{"role": "user", "content": "hello"}])


WRONG = {
    "None": (None, "message 1: content=None"),
    "a number": (3, "message 1: content=3"),
    "a mapping": ({"type": "text", "text": "a"}, "message 1: content="),
    "an image": (
        [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}],
        "message 1, part 1: only text is supported, not a part of type 'image_url'",
    ),
    "a part without text": ([{"type": "text"}], "message 1, part 0: only text"),
    "a part of another type": ([7], "part 0: only text is supported, not a part of type 'int'"),
}


@pytest.mark.parametrize(("content", "message"), WRONG.values(), ids=WRONG.keys())
def test_other_contents_are_refused_by_name(content, message):
    tokenizer = KINDS["byte level"]()
    chat = [{"role": "user", "content": "a"}, {"role": "user", "content": content}]
    with pytest.raises(InputError, match=message):
        chat_ids(tokenizer, chat)


def test_a_message_without_content_or_role_is_refused():
    tokenizer = KINDS["byte level"]()
    with pytest.raises(InputError, match=r"prompt 0, message 0: content=None"):
        chat_ids(tokenizer, [{"role": "user"}])
    with pytest.raises(InputError, match="message 1: must be a dict with 'role'"):
        chat_ids(tokenizer, [{"role": "user", "content": "a"}, {"content": "b"}])
