"""A server with asynchronous scheduling: while a step runs, the next one is planned already."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial

import simpy

from engine.core import Request, RequestId
from engine.core.plan import StepPlan
from engine.steplog.api import StepEvent
from sim.cluster.clock import SCHEDULE, STEP_END, Moment, call_at
from sim.cluster.server import Flight, Server
from sim.cost.features import StepFeatures
from sim.cost.pipeline import NO_HOST, PipelineCostModel


@dataclass(slots=True)
class Launched:
    """A step that the host has launched, and when each of the two clocks is done with it.

    `start_ns` is when the device turned to it.
    """

    plan: StepPlan
    features: StepFeatures
    open_plans: int
    start_ns: int
    host_end_ns: int
    device_end_ns: int


class AsyncServer(Server):
    """Host and device as two clocks, in vLLM's order of calls.

    Each call decides and launches a step, then waits for the result of the step before it and books
    that. So a request that arrives during a step is admitted two steps later, and a sequence that
    ends keeps its place for one step more. A cost model without a host has one that takes no time.
    Stretches of decode steps are taken one by one.
    """

    _host = NO_HOST
    _device_end_ns = _seen_ns = 0
    _num_added = _num_finished = 0

    def add(self, request: Request, row: int, first_output_id: int, num_outputs: int) -> None:
        """Takes a request at the present time; the next call of the scheduler sees it."""
        super().add(request, row, first_output_id, num_outputs)
        self._num_added += 1

    def _run(self) -> Generator[simpy.Event, None, None]:
        env = self._env
        if isinstance(self._cost, PipelineCostModel):
            self._host = self._cost.host
        while True:
            if not self.scheduler.has_work:
                self._sleep = env.event()
                yield self._sleep
            before: Launched | None = None
            while before is not None or self.scheduler.has_work:
                yield from self._between_calls()
                newest = self._launch_next() if self.scheduler.has_work else None
                if newest is not None and newest.features.chunks and self._host.arrival_ns:
                    yield from self._finish_launch(newest)
                host_end_ns = env.now if newest is None else newest.host_end_ns
                if before is None:
                    # The first call after a pause only launches.
                    yield Moment(env, host_end_ns, SCHEDULE)
                    before = newest
                    continue
                yield Moment(env, max(host_end_ns, before.device_end_ns), STEP_END)
                update_ns = self._book(before)
                if newest is not None and not newest.plan.num_entries:
                    self._drop(newest)
                    newest = None
                yield Moment(env, env.now + update_ns, SCHEDULE)
                before = newest

    def _between_calls(self) -> Generator[simpy.Event, None, None]:
        """The host's way to the next call. Arrivals of its very time come before its decision."""
        env, host = self._env, self._host
        yield Moment(env, env.now + host.between_ns, SCHEDULE)
        while self._num_added:
            added, self._num_added = self._num_added, 0
            yield Moment(env, env.now + host.intake_ns(added), SCHEDULE)

    def _launch_next(self) -> Launched:
        """Decides a step and puts it on the device behind the one that runs."""
        now = self._env.now
        host, open_plans = self._host, len(self.scheduler.open_plans)
        plan = self.scheduler.schedule()
        self._note_queues(plan, now)
        features = self._features(plan)
        start_ns = max(self._device_end_ns, now)
        decided_ns = now + host.schedule_ns(features, len(plan.admitted))
        if not plan.num_entries:
            return Launched(plan, features, open_plans, start_ns, decided_ns, start_ns)
        begins_ns = max(self._device_end_ns, decided_ns + host.prepare_ns(features))
        launched_ns = decided_ns + host.launch_ns(features, now)
        step_ns = self._cost.step_time_ns(features)
        ends_ns = begins_ns + self._with_copies(plan, step_ns)
        if features.chunks:
            ends_ns = max(ends_ns, launched_ns)
        self._device_end_ns = ends_ns
        return Launched(plan, features, open_plans, start_ns, launched_ns, ends_ns)

    def _finish_launch(self, step: Launched) -> Generator[simpy.Event, None, None]:
        """Waits for the end of a long launch, which requests that come in meanwhile put off."""
        env, known = self._env, self._num_added
        yield Moment(env, step.host_end_ns, STEP_END)
        while self._num_added > known:
            step.host_end_ns += (self._num_added - known) * self._host.arrival_ns
            known = self._num_added
            yield Moment(env, step.host_end_ns, STEP_END)
        step.device_end_ns = max(step.device_end_ns, step.host_end_ns)
        self._device_end_ns = step.device_end_ns

    def _book(self, step: Launched) -> int:
        """Commits a step whose result has come; returns how long that takes the host."""
        now = self._env.now
        host, features = self._host, step.features
        # The client takes results in order.
        seen_ns = now + host.update_ns(features, 0) + host.client_ns(features.num_sampled)
        self._seen_ns = max(self._seen_ns, seen_ns)
        self._num_finished = 0
        duration_ns = step.device_end_ns - step.start_ns
        ends_ns = [step.device_end_ns]
        self._commit(
            Flight(step.plan, features, step.start_ns, [duration_ns], ends_ns, step.open_plans), 1
        )
        return host.update_ns(features, self._num_finished)

    def _drop(self, step: Launched) -> None:
        """Ends a step that nothing was left for, since all that ran ended with the one before."""
        self._note_preempted(step.plan)
        outcome = self.scheduler.commit(step.plan, [])
        if self._log is not None:
            now = self._env.now
            self._log.step(
                StepEvent(
                    step.plan, outcome, now, 0, open_plans=step.open_plans, replica=self.index
                )
            )

    def _book_tokens(self, plan: StepPlan, ends_ns: list[int]) -> None:
        super()._book_tokens(plan, [self._seen_ns])

    def _finish(self, request_id: RequestId, time_ns: int, num_outputs: int) -> None:
        self._num_finished += 1
        row = self._forget(request_id, num_outputs)
        report = partial(self._report, row, self._seen_ns, num_outputs)
        if self._seen_ns == self._env.now:
            report()
        else:
            call_at(self._env, self._seen_ns, STEP_END, report)

    def _step_tokens(self, plan: StepPlan) -> list[int]:
        """The ids that the entries sample; the newest decode batch may be that of the next plan."""
        live = self._live
        return [
            live[entry.request_id].token_offset + entry.first_position + entry.num_tokens - 1
            for entry in plan.entries
            if entry.samples
        ]
