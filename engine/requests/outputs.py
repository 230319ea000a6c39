"""What a call returns, shaped like vLLM's offline API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.request import RequestId


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of one token under the model's unmodified distribution; rank 1 is best."""

    logprob: float
    rank: int


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request in nanoseconds of a monotonic clock, and what happened to it.

    A time is None until the event. `ttft_ms` and `e2e_ms` count from the arrival, so waiting is
    included.
    """

    arrival_ns: int
    first_scheduled_ns: int | None = None
    first_token_ns: int | None = None
    finished_ns: int | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0

    @property
    def ttft_ms(self) -> float | None:
        """Time from arrival to the first token."""
        return _span_ms(self.arrival_ns, self.first_token_ns)

    @property
    def queue_ms(self) -> float | None:
        """Time from arrival to the first step that computes something of the request."""
        return _span_ms(self.arrival_ns, self.first_scheduled_ns)

    @property
    def e2e_ms(self) -> float | None:
        """Time from arrival to the end."""
        return _span_ms(self.arrival_ns, self.finished_ns)


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """The output of one request.

    `finish_reason` is `stop`, `length`, `abort` or `error`, None while it runs. `stop_reason` is
    the stop id or string that ended it, None for an EOS id and for every other reason.
    `logprobs` holds one dict per token, the sampled token included. `error` says what went wrong
    if the reason is `error`.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        """True once the request has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's prompt with what was generated for it so far.

    `prompt_logprobs` holds one dict per prompt token, the token itself included; the first is None,
    as are those that are not computed yet.
    """

    request_id: RequestId
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


def _span_ms(start_ns: int, end_ns: int | None) -> float | None:
    return None if end_ns is None else (end_ns - start_ns) / 1e6
