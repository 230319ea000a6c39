"""How servers tell log-probabilities: what to ask for, and what an answer says of which token.

vLLM and `lockstep serve` have `prompt_logprobs`; others echo the prompt with `logprobs`; some tell
those of generated tokens only, or no more than the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from golden.endpoint.http_client import Client, EndpointProblem, Refused

# Log-probabilities at one place, by token id; the token that stands there is told apart.
Place = dict[int, float]
_TOKEN_ID = "token_id:"
MOST_TOP = 20
OPENAI_TOP = 5


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way to ask. `prompt_fields` make a server speak of the prompt, if it can."""

    name: str
    fields: Mapping[str, object]
    prompt_fields: Mapping[str, object] | None
    tells: str


@dataclass(frozen=True, slots=True)
class PromptAnswer:
    """What a server says of the tokens of a prompt: by position, from the second one on."""

    tokens: list[float | None]  # of the token that stands there
    places: list[Place]
    best: list[int | None]


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """What a server generated."""

    token_ids: list[int] | None
    tokens: list[float | None]
    places: list[Place]
    text: str


def _dialects() -> list[Dialect]:
    exact = {"temperature": 0, "return_token_ids": True, "ignore_eos": True}
    plain = {"temperature": 0}
    named = {**plain, "return_tokens_as_token_ids": True}
    found = []
    for top in (MOST_TOP, OPENAI_TOP):
        found.append(
            Dialect(
                f"prompt_logprobs with {top} tokens each",
                {**exact, "logprobs": top},
                {"prompt_logprobs": top},
                "log-probabilities of prompts and of generated tokens",
            )
        )
    for fields in (named, plain):
        how = " by token id" if fields is named else ""
        found.append(
            Dialect(
                f"echo with logprobs{how}",
                {**fields, "logprobs": OPENAI_TOP},
                {"echo": True},
                "log-probabilities of prompts and of generated tokens",
            )
        )
    for fields in (exact, named):
        found.append(
            Dialect(
                "logprobs of generated tokens",
                {**fields, "logprobs": OPENAI_TOP},
                None,
                "log-probabilities of generated tokens only",
            )
        )
    found.append(Dialect("token ids", exact, None, "generated tokens, no log-probability"))
    return found


def find_dialect(client: Client, model: str, prompt: Sequence[int]) -> Dialect:
    """The first way in which a server tells something that can be judged.

    Raises:
        EndpointProblem: it tells nothing of the kind.
    """
    refusals: list[str] = []
    for dialect in _dialects():
        try:
            if dialect.prompt_fields is not None:
                told = ask_prompt(client, model, dialect, prompt)
                if all(value is None for value in told.tokens):
                    continue
            text = ask_text(client, model, dialect, prompt, 2)
        except Refused as error:
            refusals.append(str(error))
            continue
        except Unreadable:
            continue
        says_logprobs = any(value is not None for value in text.tokens)
        if says_logprobs or (dialect.fields.get("logprobs") is None and text.token_ids):
            return dialect
    why = f" ({refusals[0]})" if refusals else ""
    raise EndpointProblem(
        f"{client.url}: returns neither log-probabilities nor token ids, so nothing can be judged"
        f"{why}: start the server with log-probabilities enabled, or ask one that has "
        "prompt_logprobs (vLLM, lockstep serve)"
    )


class Unreadable(EndpointProblem):
    """An answer has not the shape that its fields were asked for in."""


def ask_prompt(
    client: Client, model: str, dialect: Dialect, token_ids: Sequence[int]
) -> PromptAnswer:
    """Log-probabilities of a prompt's own tokens."""
    assert dialect.prompt_fields is not None
    body = {"model": model, "prompt": [*token_ids], "max_tokens": 1}
    choice = _choice(client.complete({**body, **dialect.fields, **dialect.prompt_fields}))
    if "prompt_logprobs" in dialect.prompt_fields:
        return _from_prompt_logprobs(choice.get("prompt_logprobs"), token_ids)
    return _from_echo(choice.get("logprobs"), token_ids)


def _choice(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Unreadable("an answer has no choices")
    first: Mapping[str, Any] = choices[0]
    return first


def _from_prompt_logprobs(listed: object, token_ids: Sequence[int]) -> PromptAnswer:
    """vLLM's shape: one object per token, by token id; the first is null."""
    if not isinstance(listed, list) or len(listed) != len(token_ids):
        raise Unreadable("prompt_logprobs has not one entry per token")
    tokens: list[float | None] = []
    places: list[Place] = []
    best: list[int | None] = []
    for token, entry in zip(token_ids[1:], listed[1:], strict=True):
        if not isinstance(entry, dict):
            raise Unreadable("an entry of prompt_logprobs is no object")
        place = {int(key): _number(value["logprob"]) for key, value in entry.items()}
        ranked = [int(key) for key, value in entry.items() if value.get("rank") == 1]
        tokens.append(place.get(token))
        places.append(place)
        best.append(ranked[0] if ranked else None)
    return PromptAnswer(tokens, places, best)


def _from_echo(logprobs: object, token_ids: Sequence[int]) -> PromptAnswer:
    """OpenAI's columns over prompt and output; only those of the prompt are read."""
    told, tops, _ = _columns(logprobs)
    count = len(token_ids)
    if len(told) < count:
        raise Unreadable("the echo is shorter than the prompt: its tokens are not ours")
    places = [_by_id(top) for top in tops[1:count]]
    best = [max(place, key=place.__getitem__) if place else None for place in places]
    return PromptAnswer(told[1:count], places, best)


def ask_text(
    client: Client, model: str, dialect: Dialect, token_ids: Sequence[int], num_tokens: int
) -> TextAnswer:
    """Greedy tokens after a prompt."""
    body = {"model": model, "prompt": [*token_ids], "max_tokens": num_tokens}
    choice = _choice(client.complete({**body, **dialect.fields}))
    ids = choice.get("token_ids")
    text = str(choice.get("text", ""))
    if choice.get("logprobs") is None:
        if isinstance(ids, list):
            return TextAnswer(ids, [None] * len(ids), [{}] * len(ids), text)
        return TextAnswer(None, [], [], text)
    told, tops, names = _columns(choice["logprobs"])
    if not isinstance(ids, list):
        found = [_id_of(name) for name in names]
        ids = None if None in found else [token for token in found if token is not None]
    return TextAnswer(ids, told, [_by_id(top) for top in tops], text)


def _columns(
    logprobs: object,
) -> tuple[list[float | None], list[Mapping[str, float]], list[str]]:
    if not isinstance(logprobs, dict) or not isinstance(logprobs.get("token_logprobs"), list):
        raise Unreadable("the answer has no token_logprobs")
    told = [None if value is None else _number(value) for value in logprobs["token_logprobs"]]
    tops = logprobs.get("top_logprobs") or [None] * len(told)
    names = [str(name) for name in logprobs.get("tokens") or []]
    return told, [top if isinstance(top, dict) else {} for top in tops], names


def _by_id(top: Mapping[str, float]) -> Place:
    """Only tokens that are named by id: many ids may share one text."""
    found = {}
    for name, value in top.items():
        token = _id_of(name)
        if token is not None:
            found[token] = _number(value)
    return found


def _id_of(name: str) -> int | None:
    digits = name.removeprefix(_TOKEN_ID)
    return int(digits) if name.startswith(_TOKEN_ID) and digits.isdecimal() else None


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise Unreadable("a log-probability is no number")
    return -math.inf if math.isnan(value) else float(value)
