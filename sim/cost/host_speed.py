"""How the speed of a host varies: evenly, or as a slow process that is drawn."""

from __future__ import annotations

import math
import random
from statistics import NormalDist
from typing import Protocol

import numpy as np

_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
_MOST = 2.0
_NORMAL = NormalDist()


class Speed(Protocol):
    """Factors of launch times with mean 1."""

    def factor(self, time_ns: int) -> float:
        """The factor of a launch at that time; times never decrease."""
        ...


class Steady:
    """All factors of a log-normal distribution in even alternation, so that a run has its mean.

    A period is the longer of host and device, so its mean depends on the spread of both.
    """

    def __init__(self, spread: float) -> None:
        self._spread, self._place = spread, 0.5

    def factor(self, time_ns: int) -> float:
        """The next of a sequence that fills the distribution evenly."""
        if not self._spread:
            return 1.0
        self._place = (self._place + _GOLDEN_RATIO) % 1
        return _factor(self._spread, _NORMAL.inv_cdf(min(max(self._place, 1e-6), 1 - 1e-6)))


class Drifting:
    """A latent speed that drifts: correlated over `memory_ns`, and a part that each launch has.

    `slow_share` of the variance drifts, the rest is independent; `level` is the mean.
    """

    def __init__(
        self, spread: float, memory_ns: float, slow_share: float, seed: int, level: float = 1.0
    ) -> None:
        self._mean = level
        self._spread, self._memory_ns, self._share = spread, memory_ns, slow_share
        self._random = random.Random(seed)
        self._level, self._time_ns = self._random.gauss(0, 1), 0

    def factor(self, time_ns: int) -> float:
        """Draws the next factor."""
        kept = math.exp(-(time_ns - self._time_ns) / self._memory_ns)
        fresh = math.sqrt(1 - kept * kept)
        self._level, self._time_ns = kept * self._level + fresh * self._random.gauss(0, 1), time_ns
        own = self._random.gauss(0, 1)
        mixed = math.sqrt(self._share) * self._level + math.sqrt(1 - self._share) * own
        return self._mean * _factor(self._spread, mixed)


def even_factors(spread: float, count: int) -> np.ndarray:
    """Factors that share out the distribution evenly."""
    places = [(place + 0.5) / count for place in range(count)]
    return np.array([_factor(spread, _NORMAL.inv_cdf(place)) for place in places])


def _factor(spread: float, deviation: float) -> float:
    # Recorded launches are bounded on both sides.
    deviation = min(max(deviation, -_MOST), _MOST)
    return math.exp(spread * deviation - spread * spread / 2)
