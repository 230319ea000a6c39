"""The knee of a load curve: where power, throughput over latency, is highest.

Power (Kleinrock 1979) needs no scale and no threshold: below the knee more load buys throughput
for little latency, above it latency grows faster than throughput. It does not depend on how far
the sweep goes, as measures of distance to a chord do.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sim.planning.student import student_quantile
from sim.sweep.points import CONFIDENCE, Curve, Point

THROUGHPUT, LATENCY = "output_throughput", "mean_e2el_ms"


@dataclass(frozen=True, slots=True)
class Knee:
    """The point of highest power.

    `alike` are the points whose power is not below it for sure, seed by seed; `at_edge` says that
    it is the first or last point of the curve, so that the true one may lie outside.
    """

    point: Point
    alike: Sequence[Point]
    at_edge: bool


def knee_of(curve: Curve, along: str) -> Knee | None:
    """The knee of a curve along a load; None with fewer than three points that have figures."""
    known = [point for point in curve.points if _powers(point)]
    known.sort(key=lambda point: float(str(point.setting[along])))
    if len(known) < 3:
        return None
    best = max(known, key=lambda point: statistics.fmean(_powers(point)))
    alike = [point for point in known if not _is_below(_powers(point), _powers(best))]
    return Knee(best, alike, best in (known[0], known[-1]))


def _powers(point: Point) -> list[float]:
    pairs = zip(point.values(THROUGHPUT), point.values(LATENCY), strict=False)
    return [throughput / latency for throughput, latency in pairs if latency > 0]


def _is_below(powers: Sequence[float], best: Sequence[float]) -> bool:
    """Whether the mean difference over common seeds is below 0 at the confidence."""
    gaps = [one - other for one, other in zip(powers, best, strict=False)]
    if len(gaps) < 2:
        return statistics.fmean(gaps) < 0
    error = student_quantile(CONFIDENCE, len(gaps) - 1) * statistics.stdev(gaps)
    return statistics.fmean(gaps) + error / math.sqrt(len(gaps)) < 0
