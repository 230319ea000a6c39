"""The prompts that a checkpoint is checked with: those that ship, or somebody's own file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.errors import ConfigError, InputError
from engine.text.tokenizer import Tokenizer
from golden.cases import PROMPTS, long_text, random_sequence

# Lengths around block and chunk boundaries, for a model without a tokenizer.
RANDOM_LENGTHS = (1, 15, 16, 17, 33, 64, 400)
LONG_SENTENCES = 30
_CHAT = (
    {"role": "system", "content": "You answer briefly and say so when you do not know."},
    {"role": "user", "content": "Which planet has the shortest day, and how long is it?"},
    {"role": "assistant", "content": "Jupiter: it turns once in just under ten hours."},
    {"role": "user", "content": "And which one has the longest?"},
)
_HANDBOOK = (
    "You are the assistant of a small library. The library opens at nine and closes at six, on "
    "Saturdays at one. Books may be kept for four weeks and renewed twice. Question: "
)
_TEXTS: dict[str, str] = {
    "prose": PROMPTS["text"],
    "python": PROMPTS["code"],
    "c": (
        "#include <stdint.h>\n\nstatic uint32_t rotl(uint32_t x, int k) {\n"
        "    return (x << k) | (x >> (32 - k));\n}\n\nuint32_t next(uint32_t s[4]) {\n"
        "    const uint32_t result = rotl(s[1] * 5, 7) * 9;\n    const uint32_t t = s[1] << 9;\n"
        "    s[2] ^= s[0];\n    s[3] ^= s[1];\n"
    ),
    "json": (
        '{"orders": [{"id": 4711, "items": ["tea", "cups"], "total": 23.50, "paid": true}, '
        '{"id": 4712, "items": [], "total": 0.00, "paid": false}, {"id": 4713, "items": ["'
    ),
    "numbers": "12 * 7 = 84\n13 * 7 = 91\n14 * 7 = 98\n15 * 7 = 105\n16 * 7 = 112\n17 * 7 =",
    "latin": (
        "Der Zug nach München fährt um acht Uhr ab. Le marché ouvre tôt le samedi matin. "
        "La biblioteca cierra a las nueve. Ça va très bien, merci. İstanbul'da hava güneşli."
    ),
    "cyrillic and greek": "Поезд опаздывает на десять минут. Η θάλασσα είναι ήρεμη σήμερα.",
    "right to left": "القهوة ساخنة والخبز طازج. הספר על השולחן ליד החלון.",
    "indic and thai": "आज मौसम अच्छा है और बाज़ार खुला है। วันนี้อากาศดีมาก",
    "east asian": "今日は雨が降っています。오늘은 날씨가 좋습니다. 图书馆九点开门，六点关门。",
    "symbols": "∀ε>0 ∃δ>0: |x−a|<δ ⇒ |f(x)−f(a)|<ε 🙂🚲🌧️ — “quoted” … 3½ × 10⁻⁶ №5",
    "one word repeated": "again " * 60,
    "one sentence repeated": "The bell rings twice and the gate opens. " * 12,
    "shared beginning, one": f"{_HANDBOOK}When does the library close on Saturdays? Answer:",
    "shared beginning, two": f"{_HANDBOOK}How often may a book be renewed? Answer:",
}
_SHORT = "Hi"


@dataclass(frozen=True, slots=True)
class CheckPrompt:
    """One prompt as the model's tokens."""

    name: str
    token_ids: tuple[int, ...]


def shipped_prompts(tokenizer: Tokenizer | None, vocab_size: int, limit: int) -> list[CheckPrompt]:
    """Prose, code, data, many scripts, a chat, repetition, a shared beginning and a long text.

    Without a tokenizer random ids take their place. None is longer than `limit` tokens.
    """
    if tokenizer is None:
        prompts = list(_random_prompts(vocab_size))
    else:
        prompts = [CheckPrompt(name, _encoded(tokenizer, text)) for name, text in _texts(tokenizer)]
    prompts = [CheckPrompt(item.name, item.token_ids[:limit]) for item in prompts]
    return [item for item in prompts if item.token_ids]


def _texts(tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    yield "one token or two", _SHORT
    yield from _TEXTS.items()
    yield "chat", _chat_text(tokenizer, _CHAT) or PROMPTS["chat"]
    yield "long", long_text(LONG_SENTENCES)


def _random_prompts(vocab_size: int) -> Iterator[CheckPrompt]:
    for seed, length in enumerate(RANDOM_LENGTHS):
        drawn = random_sequence("", vocab_size, length, 0, seed).prompt
        yield CheckPrompt(f"{length} random tokens", drawn)
    longest = random_sequence("", vocab_size, RANDOM_LENGTHS[-1], 0, len(RANDOM_LENGTHS) - 1).prompt
    tail = random_sequence("", vocab_size, 5, 0, 999).prompt
    yield CheckPrompt("shared beginning", (*longest[: len(longest) // 2], *tail))
    yield CheckPrompt("one token repeated", (longest[0],) * 40)


def read_prompts(
    path: Path, tokenizer: Tokenizer | None, vocab_size: int, limit: int
) -> list[CheckPrompt]:
    """Prompts of a file: JSON lines (`prompt`, `messages` or `prompt_token_ids`, and a `name`), or
    any other text with one prompt per line.

    Raises:
        InputError: a line is no prompt, or is longer than `limit` tokens.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text: {error.reason}") from None
    prompts: list[CheckPrompt] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        item = _parsed(line, where) if path.suffix in (".jsonl", ".json") else {"prompt": line}
        ids = _ids_of(item, where, tokenizer, vocab_size)
        if not ids or len(ids) > limit:
            raise InputError(f"{where}: has {len(ids)} tokens; 1 to {limit:,} can be checked")
        prompts.append(CheckPrompt(str(item.get("name", f"line {number}")), ids))
    if not prompts:
        raise InputError(f"{path}: holds no prompt")
    names = [item.name for item in prompts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{path}: two prompts are named {twice!r}")
    return prompts


def _parsed(line: str, where: str) -> Mapping[str, Any]:
    try:
        item = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {error}") from None
    if not isinstance(item, dict):
        raise InputError(f"{where}: must be an object with prompt, messages or prompt_token_ids")
    return item


def _ids_of(
    item: Mapping[str, Any], where: str, tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[int, ...]:
    ids = item.get("prompt_token_ids")
    if ids is not None:
        valid = isinstance(ids, list) and all(
            type(token) is int and 0 <= token < vocab_size for token in ids
        )
        if not valid:
            raise InputError(f"{where}: prompt_token_ids must be ids from 0 to {vocab_size - 1:,}")
        return tuple(ids)
    if tokenizer is None:
        raise InputError(f"{where}: the model has no tokenizer, so give prompt_token_ids")
    if "messages" in item:
        text = _chat_text(tokenizer, item["messages"])
        if text is None:
            raise InputError(f"{where}: the tokenizer's chat template cannot take these messages")
        return _encoded(tokenizer, text, special=False)
    if not isinstance(item.get("prompt"), str):
        raise InputError(f"{where}: must have a text `prompt`, `messages` or `prompt_token_ids`")
    return _encoded(tokenizer, item["prompt"])


def _chat_text(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> str | None:
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception:  # templates are user code and raise what they like
        return None
    return text if isinstance(text, str) else None


def _encoded(tokenizer: Tokenizer, text: str, special: bool = True) -> tuple[int, ...]:
    return tuple(int(token) for token in tokenizer.encode(text, add_special_tokens=special))


def check_max_tokens(max_tokens: int, limit: int) -> None:
    """Refuses a continuation that no prompt leaves room for."""
    if max_tokens + 1 >= limit:
        raise ConfigError("max_tokens", max_tokens, f"the model reaches {limit:,} positions")
