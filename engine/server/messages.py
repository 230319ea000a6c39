"""What crosses the border between front end and body: requests, deltas, the state of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class TokenLogprob(NamedTuple):
    """Log probability of one token at one place; rank 1 is the likeliest."""

    token_id: int
    logprob: float
    rank: int


# The token that stands at a place, then the likeliest ones in their order, each token once.
PlaceLogprobs = Sequence[TokenLogprob]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sequence to generate; a call with `n` or with several prompts is several of them.

    `max_tokens=None` runs to the model's limit. Stop strings are the front end's affair: it aborts
    with reason `stop` where it finds one. `prompt_text` is None for prompts of ids. `extra` holds
    fields that only some bodies know, such as `kv_transfer_params`; `Body.check` refuses others.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    arrival_ns: int
    prompt_text: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step gave one request: tokens, an end, or both.

    `time_ns` is when the step ended. The first delta of a request that has a token also says when
    the request was first scheduled, how many of its prompt tokens were found in the cache, and the
    log probabilities of its prompt (one entry per prompt token, the first of them None). The last
    one has a `finish_reason`: `stop`, `length`, `abort` or `error`; only it has the rest. A token
    that ends its request comes together with the reason.
    """

    token_ids: Sequence[int]
    time_ns: int
    engine: int = 0  # the replica that computed it
    logprobs: Sequence[PlaceLogprobs] | None = None
    scheduled_ns: int | None = None
    num_cached_tokens: int | None = None
    prompt_logprobs: Sequence[PlaceLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None  # a stop id of the request's own, not EOS
    num_preemptions: int = 0  # so far
    error: str | None = None
    extra: Mapping[str, object] | None = None  # such as `kv_transfer_params` of the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """The state after one step, and what the step added: the source of `/metrics`.

    `engine` is the index of the replica. Counts of prompt tokens are those of first admissions:
    `num_prompt_tokens` of requests whose prefill ended in this step, cached ones included.
    """

    engine: int
    num_running: int
    num_waiting: int
    kv_cache_usage: float  # 0 to 1
    num_step_tokens: int = 0  # all that the step computed
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0
    time_ns: int = 0
    lag_ns: int = 0  # how far a paced body is behind the clock
