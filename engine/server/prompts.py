"""Prompts of requests as token ids; long texts are tokenised outside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from engine.server.errors import ApiError
from engine.server.schemas.fields import Message
from engine.text.tokenizer import Tokenizer

# A text of this length takes a fast tokenizer about a millisecond.
_LONG_TEXT = 4096
T = TypeVar("T")


class Encoded(NamedTuple):
    """A prompt as ids, and the text it came from."""

    token_ids: list[int]
    text: str | None


async def encode_prompts(
    tokenizer: Tokenizer | None,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    add_special_tokens: bool,
) -> list[Encoded]:
    """Ids of texts or of ids, in their order.

    Raises:
        ApiError: there is no tokenizer, or it cannot take a text.
    """

    def encode() -> list[Encoded]:
        found = []
        for prompt in prompts:
            if isinstance(prompt, str):
                ids = _encode(needed(tokenizer), prompt, add_special_tokens)
                found.append(Encoded(ids, prompt))
            else:
                found.append(Encoded(list(prompt), None))
        return found

    length = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    return await _away_from_the_loop(length, encode)


async def encode_chat(
    tokenizer: Tokenizer | None,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    continue_final_message: bool,
    add_special_tokens: bool,
) -> Encoded:
    """Ids of a conversation, as the model's chat template writes it.

    Raises:
        ApiError: the template or the tokenizer cannot take it.
    """
    usable = needed(tokenizer)
    plain = [_plain(message) for message in messages]
    options = {"continue_final_message": True} if continue_final_message else {}
    try:
        text = usable.apply_chat_template(
            plain, add_generation_prompt=add_generation_prompt, tokenize=False, **options
        )
    except Exception as error:  # templates are user code and raise what they like
        kind = type(error).__name__
        detail = str(error) if kind in ("TemplateError", "ValueError") else kind
        raise ApiError(400, f"the chat template failed: {detail}", "messages") from error
    # The template writes every special token itself; a second BOS would change the output.
    ids = await _away_from_the_loop(len(text), lambda: _encode(usable, text, add_special_tokens))
    return Encoded(ids, text)


def _plain(message: Message) -> dict[str, object]:
    """The message with its content as one text, which every template understands."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    return {**(message.model_extra or {}), "role": message.role, "content": content or ""}


async def _away_from_the_loop(length: int, work: Callable[[], T]) -> T:
    """Does the work in a thread where the text is long."""
    return work() if length < _LONG_TEXT else await asyncio.to_thread(work)


def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except Exception as error:  # a tokenizer is foreign code
        kind = type(error).__name__
        raise ApiError(400, f"the text cannot be tokenised: {kind}", "prompt") from error


def needed(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer, or the refusal of a text."""
    if tokenizer is None:
        raise ApiError(400, "text needs a tokenizer, and the model has none; send token ids")
    return tokenizer
