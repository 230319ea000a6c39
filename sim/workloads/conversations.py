"""Texts as traces: ShareGPT, AIPerf's turns and vLLM's custom data, and what their tokens are."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.core.errors import ConfigError, InputError
from sim.workloads.text import Row

Encode = Callable[[str], "array[int]"]
_HUMAN, _ANSWER = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard", "model")


def is_text(row: Row) -> bool:
    """Whether a row holds texts in place of lengths."""
    fields = row.fields
    if isinstance(fields.get("conversations", fields.get("messages")), list):
        return True
    if isinstance(fields.get("turns"), list):
        return True
    return isinstance(fields.get("prompt"), str) and "prompt_tokens" not in fields


def turn_rows(path: Path, row: Row) -> Iterator[Row]:
    """One row per request: its new text, its answer (text, length or None) and its session."""
    fields = row.fields
    talk = fields.get("conversations", fields.get("messages"))
    if isinstance(talk, list):
        yield from _conversation(path, row, talk)
    elif isinstance(fields.get("turns"), list):
        yield from _aiperf_turns(path, row, fields["turns"])
    else:
        length = fields.get("output_tokens", fields.get("output_length"))
        yield Row(row.line, {"prompt_text": fields["prompt"], "answer": length})


def _conversation(path: Path, row: Row, talk: list[Any]) -> Iterator[Row]:
    """Each human turn that is answered; all between two of them belongs to the second."""
    session, pending, delay = f"row {row.line}", "", None
    for message in talk:
        if not isinstance(message, dict):
            raise InputError(f"{path}:{row.line}: a conversation must hold objects")
        speaker = message.get("from", message.get("role"))
        text = message.get("value", message.get("content"))
        if not isinstance(text, str):
            raise InputError(f"{path}:{row.line}: a message of {speaker!r} holds no text")
        if speaker in _ANSWER and pending:
            fields: dict[str, Any] = {
                "prompt_text": pending, "answer": text, "session": session,
            }  # fmt: skip
            if delay is not None:
                fields["delay"] = delay
            yield Row(row.line, fields)
            pending, delay = "", 0
        else:
            pending += text
    if pending:
        yield Row(row.line, {}, "the last turn has no answer")


def _aiperf_turns(path: Path, row: Row, turns: list[Any]) -> Iterator[Row]:
    session = str(row.fields.get("session_id", f"row {row.line}"))
    for index, turn in enumerate(turns):
        text = turn.get("text", turn.get("content")) if isinstance(turn, dict) else None
        if not isinstance(text, str):
            raise InputError(f"{path}:{row.line}: turn {index + 1} holds no text")
        answer = turn.get("max_tokens", turn.get("output_length"))
        fields = {"prompt_text": text, "answer": answer, "session": session}
        if turn.get("timestamp") is not None:
            fields["turn_ms"] = turn["timestamp"]
        elif index:
            fields["delay"] = turn.get("delay") or 0
        yield Row(row.line, fields)


def encoder(path: Path, tokenizer: str | None, chars_per_token: int | None) -> Encode:
    """What makes token ids of a text: a tokenizer, or one id per distinct piece of characters.

    Raises:
        ConfigError: neither was given, or the tokenizer cannot be read.
    """
    if tokenizer is not None:
        return _tokenizer(tokenizer)
    if chars_per_token is None:
        raise ConfigError(
            "chars_per_token", None,
            f"{path.name} holds texts: needs it, or --tokenizer with a folder",
        )  # fmt: skip
    ids: dict[str, int] = {}
    step = chars_per_token

    def encode(text: str) -> array[int]:
        pieces = (text[start : start + step] for start in range(0, len(text), step))
        return array("q", [ids.setdefault(piece, len(ids)) for piece in pieces])

    return encode


def _tokenizer(folder: str) -> Encode:
    path = Path(folder)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError("tokenizer", folder, "is no tokenizer.json and no folder with one")
    from tokenizers import Tokenizer

    try:
        found = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions
        reason = str(error).splitlines()[0][:80] if str(error) else type(error).__name__
        raise ConfigError("tokenizer", folder, f"cannot be read ({reason})") from None
    return lambda text: array("q", found.encode(text, add_special_tokens=False).ids)


def text_of(value: object) -> str | None:
    """The text of an answer, or None where it is a length or missing."""
    return value if isinstance(value, str) and not value.strip().isdigit() else None
