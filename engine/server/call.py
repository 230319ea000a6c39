"""One HTTP request while it is generated: its sequences, and their pieces as they come."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from engine.server.choice_text import ChoiceText, Piece, TextRules
from engine.server.messages import Delta, GenerateRequest, PlaceLogprobs
from engine.server.metrics import RequestTimes
from engine.server.state import ServerState


@dataclass(slots=True)
class Choice:
    """One sequence of a call."""

    index: int
    request: GenerateRequest
    text: ChoiceText
    times: RequestTimes
    is_over: bool = False
    reason: str = "abort"
    prompt_logprobs: Sequence[PlaceLogprobs | None] | None = None
    extra: dict[str, object] | None = None


_LOGGER = logging.getLogger("lockstep.server")


class Call:
    """The sequences of one HTTP request, in the order of their choices.

    Making one takes places for them in the server, `close` gives these back.

    Raises:
        ApiError: they were refused.
    """

    def __init__(
        self, state: ServerState, requests: Sequence[GenerateRequest], rules: TextRules, n: int
    ) -> None:
        state.admit(requests)
        self._state = state
        self._is_closed = False
        self.choices = [
            Choice(
                index,
                request,
                ChoiceText(rules, request.prompt_token_ids),
                RequestTimes(request, n),
            )
            for index, request in enumerate(requests)
        ]

    async def pieces(self) -> AsyncIterator[tuple[Choice, Piece]]:
        """What the body gives, until all choices are over."""
        if len(self.choices) > 1:
            async for choice, deltas in self._merged():
                yield choice, self._take(choice, deltas)
            return
        choice = self.choices[0]
        async for deltas in self._state.body.generate(choice.request):
            yield choice, self._take(choice, deltas)
            if choice.is_over:
                return

    def close(self) -> None:
        """Aborts what is not over, and gives the places back; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._abort_open()
        self._state.release(len(self.choices))
        if self._state.options.log_requests:
            for choice in self.choices:
                _LOGGER.info("%s", _summary(choice))

    def _take(self, choice: Choice, deltas: list[Delta]) -> Piece:
        now_ns = time.perf_counter_ns()
        metrics = self._state.metrics
        metrics.tokens(choice.times, deltas, now_ns)
        for delta in deltas:
            if delta.prompt_logprobs is not None:
                choice.prompt_logprobs = delta.prompt_logprobs
            if delta.extra is not None:
                choice.extra = dict(delta.extra)
        piece = choice.text.feed(deltas)
        if piece.finish_reason is not None:
            choice.is_over, choice.reason = True, piece.finish_reason
            metrics.ended(choice.times, piece.finish_reason, now_ns)
            if piece.is_cut and deltas[-1].finish_reason is None:
                self._state.body.abort(choice.request.request_id)
        return piece

    async def _merged(self) -> AsyncIterator[tuple[Choice, list[Delta]]]:
        """Deltas of all choices as they come."""
        arrived: asyncio.Queue[tuple[Choice, list[Delta]]] = asyncio.Queue()

        async def follow(choice: Choice) -> None:
            async for deltas in self._state.body.generate(choice.request):
                arrived.put_nowait((choice, deltas))

        followers = [asyncio.create_task(follow(choice)) for choice in self.choices]
        try:
            left = len(self.choices)
            while left:
                choice, deltas = await arrived.get()
                if choice.is_over:
                    continue
                yield choice, deltas
                left -= choice.is_over
        finally:
            for follower in followers:
                follower.cancel()

    def _abort_open(self) -> None:
        now_ns = time.perf_counter_ns()
        for choice in self.choices:
            if not choice.is_over:
                choice.is_over = True
                self._state.body.abort(choice.request.request_id)
                self._state.metrics.ended(choice.times, "abort", now_ns)


def _summary(choice: Choice) -> str:
    """Sizes and times of a sequence, for the log."""
    times = choice.times
    arrival_ns = choice.request.arrival_ns
    ttft_ns = 0 if times.first_token_ns is None else times.first_token_ns - arrival_ns
    e2e_ns = time.perf_counter_ns() - arrival_ns
    return (
        f"{choice.request.request_id}: {len(choice.request.prompt_token_ids)} prompt tokens, "
        f"{times.num_cached_tokens} cached, {times.num_tokens} output tokens, "
        f"{choice.reason}, ttft {ttft_ns / 1e6:.1f} ms, e2e {e2e_ns / 1e6:.1f} ms"
    )
