"""A server with asynchronous scheduling: while a step runs, the next one is planned already."""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import simpy

from engine.core.plan import StepPlan
from engine.steplog.api import StepEvent
from sim.cluster.clock import SCHEDULE, STEP_END, Moment
from sim.cluster.server import Flight, Server
from sim.cost.features import StepFeatures


class Planned(NamedTuple):
    """A step that waits for the one before it; so many plans were open when it was made."""

    plan: StepPlan
    features: StepFeatures
    open_plans: int


class AsyncServer(Server):
    """Plans each step when the one before it begins, as vLLM does by default.

    A request that arrives during a step is so admitted two steps later, and a sequence that ends
    keeps its place for one step more. Stretches of decode steps are taken one by one.
    """

    def _run(self) -> Generator[simpy.Event, None, None]:
        env = self._env
        while True:
            if not self.scheduler.has_work:
                self._sleep = env.event()
                yield self._sleep
            yield Moment(env, env.now, SCHEDULE)
            planned: Planned | None = self._plan()
            while planned is not None:
                flight = self._begin(planned)
                # Arrivals of this very time come before the plan of the step after.
                yield Moment(env, env.now, SCHEDULE)
                planned = self._plan() if self.scheduler.has_work else None
                yield Moment(env, flight.ends_ns[0], STEP_END)
                self._flight = None
                self._commit(flight, 1)
                if planned is not None and not planned.plan.num_entries:
                    self._drop(planned)
                    planned = None

    def _plan(self) -> Planned:
        open_plans = len(self.scheduler.open_plans)
        plan = self.scheduler.schedule()
        self._note_queues(plan, self._env.now)
        return Planned(plan, self._features(plan), open_plans)

    def _begin(self, planned: Planned) -> Flight:
        now = self._env.now
        plan, features, open_plans = planned
        duration_ns = self._cost.step_time_ns(features)
        ends_ns = [now + duration_ns]
        self._flight = Flight(plan, features, now, [duration_ns], ends_ns, open_plans)
        return self._flight

    def _drop(self, planned: Planned) -> None:
        """Ends a step that nothing was left for, since all that ran ended with the one before."""
        outcome = self.scheduler.commit(planned.plan, [])
        if self._log is not None:
            now = self._env.now
            self._log.step(
                StepEvent(
                    planned.plan, outcome, now, 0, open_plans=planned.open_plans, replica=self.index
                )
            )

    def _step_tokens(self, plan: StepPlan) -> list[int]:
        """The ids that the entries sample; the newest decode batch may be that of the next plan."""
        live = self._live
        return [
            live[entry.request_id].token_offset + entry.first_position + entry.num_tokens - 1
            for entry in plan.entries
            if entry.samples
        ]
