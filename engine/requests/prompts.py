"""What users may pass as prompts, turned into token ids and checked before anything is queued."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from engine.core.errors import ConfigError, InputError
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import ChatMessage, Tokenizer

# Text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list of chat messages.
PromptInput = str | Sequence[int] | Mapping[str, object] | Sequence[ChatMessage]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt as ids, with the text it came from if there was one."""

    token_ids: array[int]
    text: str | None = None


def split_prompts(prompts: object) -> list[PromptInput]:
    """One prompt or many, as a list; a list of ids and a list of messages are one prompt."""
    if isinstance(prompts, str | Mapping | array):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InputError(
            f"prompts: {type(prompts).__name__} is neither a prompt nor a list of them"
        )
    if not prompts:
        return []
    first = prompts[0]
    if isinstance(first, int) or _is_message(first):
        return [prompts]
    return list(prompts)


def to_token_prompt(
    prompt: PromptInput, tokenizer: Tokenizer | None, vocab_size: int, place: int
) -> TokenPrompt:
    """Ids of one prompt; `place` names it in errors.

    Raises:
        InputError: it is no prompt, needs a tokenizer that is missing, or holds unknown ids.
    """
    where = f"prompt {place}"
    text: str | None = None
    if isinstance(prompt, Mapping):
        prompt = _from_mapping(prompt, where)
    if isinstance(prompt, str):
        text = prompt
        ids: Iterable[object] = _needed(tokenizer, where).encode(prompt, add_special_tokens=True)
    elif isinstance(prompt, Sequence) and prompt and _is_message(prompt[0]):
        usable = _needed(tokenizer, where)
        text = _chat_text(prompt, usable, where)  # type: ignore[arg-type]
        # The template writes every special token itself; a second BOS would change the output.
        ids = usable.encode(text, add_special_tokens=False)
    elif isinstance(prompt, Sequence):
        ids = prompt
    else:
        raise InputError(f"{where}: {type(prompt).__name__} is neither text nor ids nor messages")
    return TokenPrompt(_checked_ids(ids, vocab_size, where), text)


def per_prompt_params(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """One SamplingParams per prompt; a single one serves all.

    Raises:
        ConfigError: something else was passed, or the list has another length.
    """
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence):
        raise ConfigError("sampling_params", params, "must be SamplingParams or a list of them")
    for item in params:
        if not isinstance(item, SamplingParams):
            raise ConfigError("sampling_params", item, "must be SamplingParams")
    if len(params) != num_prompts:
        text = f"the list has {len(params)} entries for {num_prompts} prompts"
        raise ConfigError("sampling_params", f"[{len(params)} entries]", text)
    return list(params)


def _from_mapping(prompt: Mapping[str, object], where: str) -> str | Sequence[int]:
    for key in ("prompt_token_ids", "prompt"):
        value = prompt.get(key)
        if value is not None and set(prompt) <= {"prompt_token_ids", "prompt"}:
            return value  # type: ignore[return-value]
    raise InputError(f"{where}: a dict must hold 'prompt' or 'prompt_token_ids', not {[*prompt]}")


def _is_message(item: object) -> bool:
    return isinstance(item, Mapping) and "role" in item


def _chat_text(messages: Sequence[ChatMessage], tokenizer: Tokenizer, where: str) -> str:
    plain = [_plain_message(item, f"{where}, message {at}") for at, item in enumerate(messages)]
    try:
        return tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates are user code and raise what they like
        raise InputError(f"{where}: the chat template failed: {error}") from error


def _plain_message(message: object, where: str) -> ChatMessage:
    """The message with its content as one text, which every template understands."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InputError(f"{where}: must be a dict with 'role' and 'content'")
    content = message.get("content")
    if isinstance(content, str):
        return message
    if not isinstance(content, Sequence):
        raise InputError(f"{where}: content={content!r} must be text or a list of text parts")
    texts = [_part_text(part, f"{where}, part {at}") for at, part in enumerate(content)]
    return {**message, "content": "".join(texts)}


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) and kind == "text" else None
    if not isinstance(text, str):
        raise InputError(f"{where}: only text is supported, not a part of type {kind!r}")
    return text


def _needed(tokenizer: Tokenizer | None, where: str) -> Tokenizer:
    if tokenizer is None:
        raise InputError(f"{where}: text needs a tokenizer, and the model folder has none")
    return tokenizer


def _checked_ids(ids: Iterable[object], vocab_size: int, where: str) -> array[int]:
    try:
        checked: array[int] = array("q", cast(Iterable[int], ids))
    except (TypeError, OverflowError) as error:
        raise InputError(f"{where}: token ids must be integers: {error}") from None
    if checked and not (min(checked) >= 0 and max(checked) < vocab_size):
        bad = next(token_id for token_id in checked if not 0 <= token_id < vocab_size)
        raise InputError(f"{where}: token id {bad} is outside the vocabulary 0..{vocab_size - 1}")
    return checked
