"""The one registry of an engine's requests, from acceptance until their output is handed over.

A request is in it exactly as long as somebody is owed its output: first as running (queued
included), then as ended. It moves by adding before removing, so an interrupt between any two
lines leaves it at least once, and the ended entry counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.plan import Finished, StepPlan
from engine.core.request import RequestId
from engine.requests.committed_step import CommittedStep, PromptRows, StepLogprobs
from engine.requests.live import LiveRequest
from engine.requests.outputs import Logprob, RequestOutput
from engine.sampling_params import RequestSampling


class RequestRegistry:
    """All requests of one engine, and what each committed step means for them."""

    def __init__(self) -> None:
        self._running: dict[RequestId, LiveRequest] = {}
        self._watched: dict[RequestId, LiveRequest] = {}
        self._ended: dict[RequestId, RequestOutput] = {}  # in the order of their ends
        self._kept: set[RequestId] = set()  # outputs that belong to one call or stream
        self._unwanted: set[RequestId] = set()  # running, but nobody is owed their output

    @property
    def num_running(self) -> int:
        """Requests that have not ended."""
        return len(self._running)

    @property
    def owes(self) -> bool:
        """Whether a request runs, or `take` would return something."""
        return bool(self._running) or any(name not in self._kept for name in self._ended)

    def __contains__(self, request_id: object) -> bool:
        """Whether the request runs."""
        return request_id in self._running

    def add(self, request: LiveRequest) -> None:
        """Registers a request."""
        if request.is_kept:
            self._kept.add(request.request_id)
        if request.is_watched:
            self._watched[request.request_id] = request
        self._running[request.request_id] = request

    def sampling_of(self, request_id: RequestId) -> RequestSampling:
        """How a running request is sampled."""
        return self._running[request_id].sampling

    # What steps mean --------------------------------------------------------------------------

    def watch(self, plan: StepPlan, token_ids: Sequence[int]) -> list[RequestId]:
        """Shows new tokens to those that follow them; returns whom they end."""
        if not self._watched:
            return []
        stopped = []
        for request_id, token_id in zip(plan.sampled_ids, token_ids, strict=True):
            request = self._watched.get(request_id)
            if request is not None and request.take_token(token_id):
                stopped.append(request_id)
        return stopped

    def spoil(self, plan: StepPlan, token_ids: Sequence[int]) -> list[RequestId]:
        """Marks those for whom no token could be drawn (-1); returns them, as they end here."""
        spoiled = []
        for request_id, token_id in zip(plan.sampled_ids, token_ids, strict=True):
            request = self._running.get(request_id)
            if token_id < 0 and request is not None:
                request.spoil()
                spoiled.append(request_id)
        return spoiled

    def record(self, step: CommittedStep) -> None:
        """Books a committed step and ends the requests that it ended."""
        plan, end_ns = step.plan, step.end_ns
        for request_id in plan.preempted:
            if request_id in self._running:
                self._running[request_id].metrics.num_preemptions += 1
        for admission in plan.admitted:
            request = self._running.get(admission.request_id)
            if request is not None and request.metrics.first_scheduled_ns is None:
                request.metrics.first_scheduled_ns = step.start_ns
                request.metrics.num_cached_tokens = admission.hit_tokens
        for chunk in plan.chunks:
            request = self._running.get(chunk.request_id) if chunk.samples else None
            if request is not None and request.metrics.first_token_ns is None:
                request.metrics.first_token_ns = end_ns
        if step.logprobs is not None:
            self._record_logprobs(step, step.logprobs)
        if step.prompt_logprobs is not None:
            self._record_prompt_logprobs(step.prompt_rows, step.prompt_logprobs)
        for finished in step.outcome.finished:
            self.finish(finished, end_ns)

    def finish(self, finished: Finished, end_ns: int, error: str = "") -> None:
        """Ends a request as the kernel says; `error` is the cause of reason `error`."""
        request = self._running[finished.request_id]
        if finished.reason == "error":
            output = request.fail(error, end_ns, finished.output_token_ids)
        else:
            output = request.finish(finished, end_ns)
        if finished.request_id not in self._unwanted:
            self._ended[finished.request_id] = output
        self._watched.pop(finished.request_id, None)
        self._running.pop(finished.request_id)
        self._unwanted.discard(finished.request_id)

    def fail_all(self, error: str, end_ns: int) -> None:
        """Ends every running request with reason `error`; what ended before stays as it is."""
        for request_id, request in self._running.items():
            if request_id not in self._ended and request_id not in self._unwanted:
                self._ended[request_id] = request.fail(error, end_ns)
        self._watched.clear()
        self._running.clear()
        self._unwanted.clear()

    # Outputs ----------------------------------------------------------------------------------

    def progress(self, request_ids: Iterable[RequestId]) -> list[RequestOutput]:
        """Outputs so far of those requests that still run."""
        return [self._running[name].progress() for name in request_ids if name in self._running]

    def take(self) -> list[RequestOutput]:
        """Hands over all outputs that nobody keeps, in the order of their ends."""
        return self._hand_over([name for name in self._ended if name not in self._kept])

    def claim(self, request_ids: Sequence[RequestId]) -> list[RequestOutput]:
        """Hands over the outputs of those of these requests that have ended, in their order."""
        ready = [name for name in request_ids if name in self._ended]
        self._kept.difference_update(ready)
        return self._hand_over(ready)

    def _hand_over(self, ready: list[RequestId]) -> list[RequestOutput]:
        # One expression without Python code in it: an interrupt comes before all of it or behind.
        return list(map(self._ended.pop, ready))

    def claim_one(self, request_id: RequestId) -> RequestOutput | None:
        """Hands over the output of a request, if it has ended."""
        self._kept.discard(request_id)
        return self._ended.pop(request_id, None)

    def disown(self, request_ids: Iterable[RequestId]) -> None:
        """Nobody is owed these outputs any more; those of running requests will be dropped."""
        gone = frozenset(request_ids)
        self._unwanted |= gone & self._running.keys()
        for name in gone:
            self._ended.pop(name, None)
        self._kept -= gone

    def clear(self) -> None:
        """Drops everything: the engine is closed by its user."""
        self._watched.clear()
        self._running.clear()
        self._ended.clear()
        self._kept.clear()
        self._unwanted.clear()

    def _record_logprobs(self, step: CommittedStep, columns: StepLogprobs) -> None:
        # A step voids entries of requests that ended before, so the plan's ids are what counts.
        for row, request_id in enumerate(step.plan.sampled_ids):
            request = self._running.get(request_id)
            if request is None or request.logprobs is None or request.params.logprobs is None:
                continue
            entry = _entry(columns, row, step.token_ids[row], request.params.logprobs)
            request.logprobs.append(entry)

    def _record_prompt_logprobs(self, parts: Sequence[PromptRows], columns: StepLogprobs) -> None:
        row = 0
        for part in parts:
            request = self._running.get(part.request_id)
            for place in range(part.first, part.first + part.count):
                if request is not None and request.prompt_logprobs is not None:
                    token_id = request.prompt.token_ids[place]
                    count = request.params.prompt_logprobs or 0
                    request.prompt_logprobs[place] = _entry(columns, row, token_id, count)
                row += 1


def _entry(columns: StepLogprobs, row: int, token_id: int, count: int) -> dict[int, Logprob]:
    """The likeliest tokens of a row, and the token that stands there."""
    best = zip(columns.top_ids[row][:count], columns.top_logprobs[row], strict=False)
    entry = {name: Logprob(value, rank) for rank, (name, value) in enumerate(best, 1)}
    entry.setdefault(token_id, Logprob(columns.sampled[row], columns.ranks[row]))
    return entry
