"""Schemas to sequences: one `GenerateRequest` per prompt and choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from engine.server.messages import GenerateRequest
from engine.server.prompts import Encoded
from engine.server.schemas.fields import SamplingFields

_LARGEST_SEED = 2**63 - 1
T = TypeVar("T")


def sequences(
    call_id: str,
    fields: SamplingFields,
    prompts: Sequence[Encoded],
    arrival_ns: int,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> list[GenerateRequest]:
    """The sequences of a call, the choices of a prompt beside each other."""
    found: list[GenerateRequest] = []
    for prompt in prompts:
        for choice in range(fields.n):
            seed = None if fields.seed is None else _choice_seed(fields.seed, choice)
            found.append(
                GenerateRequest(
                    request_id=f"{call_id}-{len(found)}",
                    prompt_token_ids=prompt.token_ids,
                    prompt_text=prompt.text,
                    arrival_ns=arrival_ns,
                    max_tokens=max_tokens,
                    min_tokens=fields.min_tokens,
                    temperature=_or(fields.temperature, 1.0),
                    top_p=_or(fields.top_p, 1.0),
                    top_k=_or(fields.top_k, 0),
                    min_p=_or(fields.min_p, 0.0),
                    seed=seed,
                    stop_token_ids=tuple(fields.stop_token_ids or ()),
                    ignore_eos=fields.ignore_eos,
                    logprobs=logprobs,
                    prompt_logprobs=prompt_logprobs,
                    priority=fields.priority,
                    extra=fields.passed_on,
                )
            )
    return found


def _choice_seed(seed: int, choice: int) -> int:
    """As in vLLM: the n choices of one seed differ, and are the same each time."""
    seed += choice
    return seed if seed <= _LARGEST_SEED else seed - 2**63


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
