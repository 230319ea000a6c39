"""The noise of step times: errors of held-out predictions, and what a further run is off by."""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from engine.core.errors import InputError
from sim.calibration.profile import NoiseSource

_ANGLES = 4096


class Noise:
    """Draws relative errors of steps as they were on one of the calibration logs.

    Runs differ from one another by more than their steps do. So a replicate draws one log, takes
    blocks of consecutive errors from it, and shifts them all, instead of by that log's own mean, by
    what a further run may be off by: the quantile `level` of Student's prediction interval with the
    spread of the logs' means. Replicates should share out the levels evenly, see `levels`.
    """

    def __init__(self, sources: tuple[NoiseSource, ...], seed: int, level: float = 0.5) -> None:
        usable = [source for source in sources if any(source.kinds)]
        if len(usable) < 2:
            raise InputError("the profile holds no held-out errors of two or more logs")
        self._random = random.Random(seed)
        self._seed = seed
        self._source = source = self._random.choice(usable)
        # A log without steps of some kind lends those of another.
        self._blocks = [blocks or max(source.kinds, key=len) for blocks in source.kinds]
        self._ahead: list[list[float]] = [[] for _ in self._blocks]
        count = len(usable)
        spread = statistics.stdev(source.mean for source in usable) * math.sqrt(1 + 1 / count)
        # The mean of the means is what fits to fewer logs were off by, not what this fit is.
        self.shift = student_quantile(level, count - 1) * spread
        self._added = self.shift - source.mean

    def peek(self, kind: int, count: int) -> list[float]:
        """Errors of the next steps of a kind."""
        ahead, blocks = self._ahead[kind], self._blocks[kind]
        while len(ahead) < count:
            ahead.extend([error + self._added for error in self._random.choice(blocks)])
        return ahead[:count]

    def advance(self, kind: int, count: int) -> None:
        """Uses up the errors of steps that ran."""
        self.peek(kind, count)
        del self._ahead[kind][:count]

    def describe(self) -> Mapping[str, Any]:
        """Seed and log."""
        return {"seed": self._seed, "log": self._source.name}


def levels(replicates: int) -> list[float]:
    """Quantile levels that share out the interval from 0 to 1 evenly."""
    return [(replicate + 0.5) / replicates for replicate in range(replicates)]


def student_quantile(level: float, freedom: int) -> float:
    """Quantile of Student's distribution.

    With t = sqrt(freedom) tan(angle) its density is proportional to cos(angle)^(freedom - 1).
    """
    angles = [math.pi * ((step + 0.5) / _ANGLES - 0.5) for step in range(_ANGLES)]
    sums = list(accumulate(math.cos(angle) ** (freedom - 1) for angle in angles))
    place = bisect_left(sums, level * sums[-1])
    before = sums[place - 1] if place else 0.0
    share = (level * sums[-1] - before) / (sums[place] - before)
    return math.sqrt(freedom) * math.tan(math.pi * ((place + share) / _ANGLES - 0.5))
