"""Events in a fixed order: at one time step ends, then arrivals, then schedules."""

from __future__ import annotations

from collections.abc import Callable

import simpy

STEP_END = 0
ARRIVAL = 1
SCHEDULE = 2


class Moment(simpy.Event):  # type: ignore[misc]  # simpy is read untyped
    """An event that happens at `time_ns` with a priority of this module."""

    def __init__(self, env: simpy.Environment, time_ns: int, priority: int) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        env.schedule(self, priority, time_ns - env.now)


def call_at(
    env: simpy.Environment, time_ns: int, priority: int, action: Callable[[], None]
) -> None:
    """Calls `action` at that time and priority."""
    Moment(env, time_ns, priority).callbacks.append(lambda _: action())
