"""Linear percentiles, of plain values and of values that are pooled with counts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from sim.metrics.token_gaps import GapPool


def percentiles(values: ArrayLike, percents: Sequence[float]) -> list[float]:
    """Percentiles of values, which may be infinite; nan where there are no values."""
    column = np.asarray(values, dtype=np.float64)
    if not len(column):
        return [math.nan] * len(percents)
    if np.isfinite(column).all():
        cuts: list[float] = np.percentile(column, percents).tolist()
        return cuts
    ordered = np.sort(column)
    return [_cut(ordered, percent) for percent in percents]


def _cut(ordered: np.ndarray, percent: float) -> float:
    """Between two infinite values, or at a finite one, no interpolation may make a nan."""
    place = (len(ordered) - 1) * percent / 100
    low, high = float(ordered[math.floor(place)]), float(ordered[math.ceil(place)])
    share = place - math.floor(place)
    return low if not share or low == high else low + (high - low) * share


def gap_percentiles(pool: GapPool, percents: Sequence[float]) -> list[float]:
    """Percentiles in ns of all gaps of a pool; nan where there are none."""
    values, counts = pool.distinct()
    if not len(values):
        return [math.nan] * len(percents)
    ends = np.cumsum(counts)
    cuts = []
    for percent in percents:
        place = (int(ends[-1]) - 1) * percent / 100
        low = int(values[np.searchsorted(ends, math.floor(place), side="right")])
        high = int(values[np.searchsorted(ends, math.ceil(place), side="right")])
        cuts.append(low + (high - low) * (place - math.floor(place)))
    return cuts
