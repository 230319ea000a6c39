"""Events in a fixed order: at one time step ends, then arrivals, then schedules."""

from __future__ import annotations

from collections.abc import Callable

import simpy
from simpy.events import EventPriority

STEP_END = EventPriority(0)
ARRIVAL = EventPriority(1)
SCHEDULE = EventPriority(2)


class Clock(simpy.Environment):
    """Simulated time in whole nanoseconds from 0."""

    @property
    def now(self) -> int:
        """The present time; SimPy allows fractions, which nothing here ever schedules."""
        return self._now  # type: ignore[return-value]


class Moment(simpy.Event):
    """An event that happens at `time_ns` with a priority of this module."""

    def __init__(self, env: Clock, time_ns: int, priority: EventPriority) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        env.schedule(self, priority, time_ns - env.now)


def call_at(env: Clock, time_ns: int, priority: EventPriority, action: Callable[[], None]) -> None:
    """Calls `action` at that time and priority."""
    Moment(env, time_ns, priority).callbacks.append(lambda _: action())
