"""Replicas of the twin: the simulator's servers, whose requests come, and may go, at any moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.core import Request, RequestId
from engine.core.plan import Entry, StepPlan
from engine.steplog.api import AddRecord, DecodeRunEvent, StepEvent, StepListener
from sim.cluster.async_server import AsyncServer
from sim.cluster.server import Server
from sim.metrics.token_gaps import GapPool
from sim.twin.answers import Answer


class ForgetfulGaps(GapPool):
    """Keeps no gaps: `/metrics` counts them, and a twin may run for months."""

    def add(self, gap_ns: int, count: int = 1) -> None:
        """Nothing is kept."""


class TwinServer(Server):
    """A server that samples the tokens of made-up answers, and ends requests when asked to."""

    _answers: dict[RequestId, Answer]
    is_down = False
    _counted = (0, 0)

    def answer_with(self, answers: dict[RequestId, Answer]) -> None:
        """Says where the answers of its requests will be put; called once, before any request."""
        self._answers = answers

    def take(self, request: Request, row: int, answer: Answer) -> None:
        """Takes a request that is to be answered like this.

        Raises:
            RequestRejected: it can never run; nothing has changed.
        """
        self._answers[request.request_id] = answer
        try:
            self.add(request, row, 0, 0)
        except BaseException:
            del self._answers[request.request_id]
            raise

    def abort(self, request_id: RequestId) -> None:
        """Ends a request, with the step that runs where one does."""
        self.sync()
        finished = self.scheduler.abort(request_id)
        if finished is not None:
            row = self._forget(request_id, len(finished.output_token_ids))
            self._report(row, self._env.now, len(finished.output_token_ids))

    @property
    def seen_ns(self) -> int:
        """When a client sees what the step that was committed last gave it."""
        return self._env.now

    def take_prefix_counts(self) -> tuple[int, int]:
        """Tokens that were looked up in the prefix cache since the last call, and found."""
        seen, self._counted = self._counted, (self.stats.queried_tokens, self.stats.hit_tokens)
        return self._counted[0] - seen[0], self._counted[1] - seen[1]

    def _launch(self) -> None:
        # All may have been aborted since the process was woken.
        if self.scheduler.has_work:
            super()._launch()

    def _step_tokens(self, plan: StepPlan) -> list[int]:
        return [self._sampled(entry) for entry in plan.entries if entry.samples]

    def _sampled(self, entry: Entry) -> int:
        live = self._live.get(entry.request_id)
        if live is None:
            return 0  # aborted since the step was planned: whatever it samples is void
        place = entry.first_position + entry.num_tokens - live.prompt_tokens
        return self._answers[entry.request_id].token(place)

    def _forget(self, request_id: RequestId, num_outputs: int) -> int:
        self._answers.pop(request_id, None)
        return super()._forget(request_id, num_outputs)


class AsyncTwinServer(TwinServer, AsyncServer):
    """The same with asynchronous scheduling."""

    @property
    def seen_ns(self) -> int:
        """When a client sees what the step that was committed last gave it."""
        return max(self._env.now, self._seen_ns)


class Listeners:
    """Hands the events of a server to the twin, and to a step log where one is written."""

    def __init__(self, on_step: Callable[[StepEvent], None], log: StepListener | None) -> None:
        self._on_step, self._log = on_step, log

    def add(self, record: AddRecord) -> None:
        """A request was accepted; its outputs are not known before they are sampled."""
        if self._log is not None:
            self._log.add(replace(record, outputs=None))

    def step(self, event: StepEvent) -> None:
        """A step was committed."""
        if self._log is not None:
            self._log.step(event)
        self._on_step(event)

    def decode_run(self, event: DecodeRunEvent) -> None:
        """Never: the servers of a twin go step by step."""
        raise AssertionError("a twin goes step by step")
