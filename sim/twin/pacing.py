"""Simulated time that keeps up with the wall clock."""

from __future__ import annotations

import asyncio
import time

from sim.cluster.clock import Clock

# Timers of event loops count whole milliseconds and are late by up to one; what is due within
# half of one is done at once, so that the mean error is about 0.
_AHEAD_NS = 500_000
# For so long events are worked off before other tasks of the loop get their turn.
_TURN_NS = 2_000_000
NS_PER_S = 1_000_000_000


class Pace:
    """Runs a clock so that it shows the time since `start`, `speed` times as fast.

    Wall times are those of `time.perf_counter_ns`. The clock itself never waits for late work: a
    step that was computed late still ends at its simulated time, and `lag_ns` says how late.
    """

    def __init__(self, clock: Clock, speed: float = 1.0) -> None:
        self.clock, self.speed = clock, speed
        self.lag_ns = 0  # of the newest event, in wall time
        self.max_lag_ns = 0
        self._origin_ns = time.perf_counter_ns()
        self._stopped_at_ns: int | None = None
        self._waiter: asyncio.Future[None] | None = None

    def start(self) -> None:
        """The present simulated time is now."""
        self._origin_ns = time.perf_counter_ns() - round(self.clock.now / self.speed)

    def stop(self) -> None:
        """Simulated time stands still from here on."""
        if self._stopped_at_ns is None:
            self._stopped_at_ns = time.perf_counter_ns()
            self.poke()

    def go_on(self) -> None:
        """Undoes `stop`; the time between did not pass."""
        if self._stopped_at_ns is not None:
            self._origin_ns += time.perf_counter_ns() - self._stopped_at_ns
            self._stopped_at_ns = None
            self.poke()

    def simulated_ns(self, wall_ns: int) -> int:
        """The simulated time at a wall time, not before the clock's present one."""
        if self._stopped_at_ns is not None:
            wall_ns = min(wall_ns, self._stopped_at_ns)
        return max(self.clock.now, int((wall_ns - self._origin_ns) * self.speed))

    def wall_ns(self, simulated_ns: int) -> int:
        """The wall time at which the clock should show that time."""
        return self._origin_ns + round(simulated_ns / self.speed)

    def poke(self) -> None:
        """Something was scheduled: looks again at what is due next."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def run(self) -> None:
        """Works off events when they are due, for ever."""
        while True:
            await self._work_off()
            await self._wait()

    async def _work_off(self) -> None:
        clock, turn_ends_ns = self.clock, time.perf_counter_ns() + _TURN_NS
        while self._stopped_at_ns is None:
            due = clock.peek()
            now_ns = time.perf_counter_ns()
            if due == float("inf") or self.wall_ns(int(due)) > now_ns + _AHEAD_NS:
                return
            self.lag_ns = max(0, now_ns - self.wall_ns(int(due)))
            self.max_lag_ns = max(self.max_lag_ns, self.lag_ns)
            clock.step()
            if now_ns > turn_ends_ns:
                await asyncio.sleep(0)
                turn_ends_ns = time.perf_counter_ns() + _TURN_NS

    async def _wait(self) -> None:
        """Returns when the next event is due, or earlier after a `poke`."""
        loop = asyncio.get_running_loop()
        due = float("inf") if self._stopped_at_ns is not None else self.clock.peek()
        waiter = self._waiter = loop.create_future()
        timer = None
        if due != float("inf"):
            left_ns = self.wall_ns(int(due)) - time.perf_counter_ns() - _AHEAD_NS
            timer = loop.call_later(max(0, left_ns) / NS_PER_S, self.poke)
        try:
            await waiter
        finally:
            if timer is not None:
                timer.cancel()
