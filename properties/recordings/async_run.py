"""Runs a recorded workload as vLLM's engine core does with a batch queue of two.

One call of the engine's step function schedules a step if there is something to do, and applies
the result of the oldest one unless the queue is still filling. So in steady state step t + 1 is
decided, then the tokens of t come in, then arrivals, then t + 2 is decided. After the last request
has ended, calls go on that only report this to the model runner; they decide nothing (`flush`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.core.plan import StepOutcome, StepPlan
from engine.core.request import RequestId
from properties.recordings.recording import (
    ReplayedScheduler,
    Step,
    Workload,
    decision_fields,
    queue_fields,
)

QUEUE_SIZE = 2
_NOTHING = ("batch", "known", "samples", "admitted", "preempted", "new_blocks")


@dataclass(slots=True)
class _Queued:
    """A scheduled step whose result has not been applied; `plan` is None for a flush."""

    call: int
    plan: StepPlan | None
    batch: list[RequestId]
    preempted_since: set[RequestId] = field(default_factory=set)


class AsyncRun:
    """One workload on one scheduler; iterate over `calls`."""

    def __init__(self, workload: Workload, scheduler: ReplayedScheduler) -> None:
        self._workload = workload
        self._scheduler = scheduler
        self._outputs = {item.request.request_id: item.outputs for item in workload.requests}
        self._prompts = {
            item.request.request_id: len(item.request.prompt) for item in workload.requests
        }
        self._queue: deque[_Queued] = deque()
        self._report = False
        self._ended: set[RequestId] = set()

    def calls(self) -> Iterator[Step]:
        """What each call decided and applied, in the form of the recording."""
        arrivals = list(reversed(self._workload.requests))
        call = 0
        while True:
            arrived = []
            while arrivals and arrivals[-1].arrival_step <= call:
                request = arrivals.pop().request
                self._scheduler.add(request)
                arrived.append(request.request_id)
            if self._has_work:
                yield self._call(call, arrived)
                call += 1
            elif arrivals:
                call = arrivals[-1].arrival_step
            else:
                return

    @property
    def _has_work(self) -> bool:
        return bool(self._scheduler.has_work or self._report or self._queue)

    def _call(self, call: int, arrived: list[RequestId]) -> Step:
        step: Step = {"step": call, "arrived": arrived, "scheduled": False, "updated": None}
        step.update({name: [] for name in (*_NOTHING, "finished", "finish_reasons")})
        step.update({"dropped": [], "stale": []})
        if self._scheduler.has_work or self._report:
            self._schedule(call, step)
            still_filling = len(self._queue) < QUEUE_SIZE
            if still_filling and (self._queue[-1].batch or self._scheduler.has_work):
                return step
        if self._queue:
            self._update(step)
        return step

    def _schedule(self, call: int, step: Step) -> None:
        scheduler = self._scheduler
        flush = not scheduler.has_work
        step["scheduled"], step["flush"] = True, flush
        step["in_flight"] = [queued.call for queued in self._queue]
        self._report = False
        first = self._workload.first_block_id
        if flush:
            self._queue.append(_Queued(call, None, []))
            step["kind"] = "empty"
        else:
            known = self._known()
            plan = scheduler.schedule()
            step.update(decision_fields(plan, first))
            batch = [entry.request_id for entry in plan.entries]
            step["known"] = [known[request_id] for request_id in batch]
            step["samples"] = list(plan.sampled_ids)
            for queued in self._queue:
                queued.preempted_since.update(plan.preempted)
            self._queue.append(_Queued(call, plan, batch))
        step.update(queue_fields(scheduler, first))

    def _known(self) -> dict[RequestId, int]:
        """Prompt and outputs of every live request, those in flight left out."""
        ids = [*self._scheduler.waiting_ids(), *self._scheduler.running_ids()]
        return {i: self._prompts[i] + len(self._scheduler.output_token_ids(i)) for i in ids}

    def _update(self, step: Step) -> None:
        queued = self._queue.popleft()
        step["updated"] = queued.call
        step["dropped"] = [request_id for request_id in queued.batch if request_id in self._ended]
        step["stale"] = [i for i in queued.batch if i in queued.preempted_since]
        if queued.plan is None:
            return
        outcome = self._commit(queued.plan)
        step["finished"] = [end.request_id for end in outcome.finished]
        step["finish_reasons"] = [end.reason for end in outcome.finished]
        if outcome.finished:
            self._report = True
            self._ended.update(step["finished"])
            after = queue_fields(self._scheduler, self._workload.first_block_id)
            step.update({f"{name}_after": value for name, value in after.items()})

    def _commit(self, plan: StepPlan) -> StepOutcome:
        tokens = []
        for entry in plan.entries:
            if entry.samples:
                place = entry.first_position + entry.num_tokens - self._prompts[entry.request_id]
                outputs = self._outputs[entry.request_id]
                # An entry past the end is dropped; what it samples is not recorded.
                tokens.append(outputs[place] if place < len(outputs) else 0)
        return self._scheduler.commit(plan, tokens)
