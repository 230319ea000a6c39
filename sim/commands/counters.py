"""Live counters on standard error, with the time that is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

_DRAW_EVERY_S = 0.5


def time_left(passed_s: float, done: int, total: int) -> str:
    """`, about 40 s left` at the pace so far; empty where nothing is done, or all."""
    if not 0 < done < total:
        return ""
    left_s = passed_s * (total - done) / done
    if left_s < 90:
        return f", about {left_s:.0f} s left"
    if left_s < 5400:
        return f", about {left_s / 60:.0f} min left"
    return f", about {left_s / 3600:.1f} h left"


class Counter:
    """One line for people that is redrawn; the clock only decides how often.

    Calling it with a count draws it. It shows nothing where standard error is no terminal.
    """

    def __init__(
        self,
        total: int,
        what: str,
        shown: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._what, self._clock = total, what, clock
        self.shown = shown and sys.stderr.isatty()
        self._begin = self._drawn = clock()

    def __call__(self, done: int) -> None:
        """`done` of the total have ended."""
        now = self._clock()
        if self.shown and (now - self._drawn >= _DRAW_EVERY_S or done == self._total):
            self._drawn = now
            left = time_left(now - self._begin, done, self._total)
            text = f"  {done:,} of {self._total:,} {self._what}{left}"
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Ends the line."""
        if self.shown:
            print(file=sys.stderr)
