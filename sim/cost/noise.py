"""The noise of step times: errors of held-out predictions, and what a further run is off by."""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from engine.core.errors import InputError
from sim.cost.profile import NoiseSource
from sim.cost.terms import SHARED_READ_COST, SHARED_READ_RANGE

_ANGLES = 4096
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Replicate:
    """What is unknown about a further run as a whole.

    `level` is the quantile of how far its steps are off; `shared_read_cost` is not in the profile
    either, and depends on the engine's attention kernel.
    """

    level: float = 0.5
    shared_read_cost: float = SHARED_READ_COST


def replicates(count: int, seed: int) -> list[Replicate]:
    """Replicates that share out both unknowns, and the pairs of them, evenly.

    The points of a lattice: one unknown goes up in equal steps, the other one in steps of the
    golden ratio, modulo 1, from a start that depends on the seed.
    """
    (low, high), start = SHARED_READ_RANGE, random.Random(seed).random()
    found = []
    for place in range(count):
        share = (start + place * _GOLDEN_RATIO) % 1
        found.append(Replicate((place + 0.5) / count, low + (high - low) * share))
    return found


class Noise:
    """Draws relative errors of steps as they were on one of the calibration logs.

    Runs differ from one another by more than their steps do. So a replicate draws one log, takes
    blocks of consecutive errors from it, and shifts them all, instead of by that log's own mean, by
    what a further run may be off by: a quantile of Student's prediction interval with the spread of
    the logs' means.
    """

    def __init__(
        self, sources: tuple[NoiseSource, ...], seed: int, replicate: Replicate | None = None
    ) -> None:
        replicate = replicate or Replicate()
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
        self.shift = student_quantile(replicate.level, count - 1) * spread
        self.shared_read_cost = replicate.shared_read_cost
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
