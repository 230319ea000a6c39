"""Open-loop arrival processes, drawn as drawn: gaps are not rescaled to the exact rate."""

from __future__ import annotations

import math
from array import array
from itertools import accumulate

import numpy as np

from engine.core.errors import ConfigError

PROCESSES = ("poisson", "gamma", "constant")
# Requests per second: from one in a fortnight to one in a nanosecond, the clock's unit.
LEAST_RATE, MOST_RATE = 1e-6, 1e9
LEAST_BURSTINESS, MOST_BURSTINESS = 1e-4, 1e6
# The clock counts nanoseconds in 64 bits, which are 292 years; a run must end before.
LATEST_ARRIVAL_NS = 2**62


def check_rate(option: str, rate: float) -> None:
    """Raises ConfigError where a rate is not a positive finite number."""
    if not (math.isfinite(rate) and rate > 0):
        raise ConfigError(option, rate, "must be a positive finite number")


def check_span(option: str, value: float, last_ns: float) -> None:
    """Raises ConfigError where `value` puts the last arrival beyond what a clock can count."""
    if not last_ns < LATEST_ARRIVAL_NS:
        years = LATEST_ARRIVAL_NS / 1e9 / (365 * 86400)
        raise ConfigError(option, value, f"the last request would come after {years:.0f} years")


def draw_arrivals(
    process: str, rate: float, count: int, rng: np.random.Generator, burstiness: float = 1.0
) -> array[int]:
    """Arrival times in ns; the first request arrives at 0.

    `burstiness` is the shape of the gamma distribution of the gaps: 1 is Poisson, smaller is
    burstier; the coefficient of variation is its -1/2 power.
    """
    check_rate("rate", rate)
    check_rate("burstiness", burstiness)
    mean_ns = 1e9 / rate
    check_span("rate", rate, mean_ns * count)
    if process == "constant":
        return array("q", [round(row * mean_ns) for row in range(count)])
    if process == "poisson":
        gaps = rng.exponential(mean_ns, max(0, count - 1))
    elif process == "gamma":
        gaps = rng.gamma(burstiness, mean_ns / burstiness, max(0, count - 1))
    else:
        raise ConfigError("arrival", process, f"must be one of {', '.join(PROCESSES)}")
    check_span("rate", rate, float(gaps.sum()))
    whole = [0, *(round(gap) for gap in gaps.tolist())][:count]
    return array("q", accumulate(whole))
