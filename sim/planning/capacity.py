"""The highest sustainable rate: bracketing and bisection per seed, and an interval over seeds.

Capacity need not be monotone in the rate, so a stated capacity is the highest rate such that
every tested rate at or below it met the SLO, and rates around it are tested on purpose.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

from sim.planning.student import student_quantile
from sim.planning.trial import Trial, TrialResult

Trials = Generator[Sequence[Trial], Sequence[TrialResult], "SeedCapacity"]
# A rate so far below the saturated throughput that a miss there is not the queue's doing.
_UNLOADED = 0.02
_FIRST_STEP = 1.25
_AROUND = (0.8, 0.9, 1.1, 1.25)


@dataclass(slots=True)
class SeedCapacity:
    """What one seed's search found; `low` met the SLO and `high` missed it, `high / low` is small.

    `low` is None if no tested rate met it. `islands` are rates that met it above one that did not.
    """

    seed: int
    low: float | None = None
    high: float | None = None
    tested: dict[float, TrialResult] = field(default_factory=dict)
    islands: tuple[float, ...] = ()

    @property
    def rate(self) -> float | None:
        """Middle of the bracket."""
        if self.low is None or self.high is None:
            return None
        return math.sqrt(self.low * self.high)

    def settle(self) -> None:
        """Finds the bracket anew from all tested rates."""
        missed = [rate for rate, result in self.tested.items() if not result.met]
        self.high = min(missed, default=None)
        below = [
            rate
            for rate, result in self.tested.items()
            if result.met and (self.high is None or rate < self.high)
        ]
        self.low = max(below, default=None)
        above = [rate for rate, result in self.tested.items() if result.met]
        self.islands = tuple(sorted(r for r in above if self.high is not None and r > self.high))

    def closest(self) -> TrialResult | None:
        """The run that came nearest to the SLO."""
        known = [result for result in self.tested.values() if result.worst is not None]
        return min(known, key=lambda result: result.worst or math.inf, default=None)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds with its interval at some confidence, resolution of the search included."""

    mean: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half of its width."""
        return (self.high - self.low) / 2 if self.low else self.high - self.mean

    def is_useful(self, width: float) -> bool:
        """Whether half of it is at most this share of the mean."""
        return self.half <= width * self.mean * (1 + 1e-9)


def interval_of(rates: Sequence[float], confidence: float, tolerance: float) -> Interval:
    """Student's interval of the mean, widened by half of the bisection's last bracket."""
    mean = statistics.fmean(rates)
    half = mean * tolerance / 2
    if len(rates) > 1:
        quantile = student_quantile(confidence, len(rates) - 1)
        half += quantile * statistics.stdev(rates) / math.sqrt(len(rates))
    return Interval(mean, max(0.0, mean - half), mean + half)


def is_beaten(rates: Sequence[float], best: Sequence[float], confidence: float) -> bool:
    """Whether a configuration's scores are below the best's for sure, by seeds that both have seen.

    A seed stands for the same requests in both, so that the differences vary less than the rates.
    """
    pairs = [one - other for one, other in zip(rates, best, strict=False)]
    if len(pairs) < 2:
        return False
    quantile = student_quantile(confidence, len(pairs) - 1)
    error = quantile * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return statistics.fmean(pairs) + error < 0


def rounded(rate: float) -> float:
    """Five digits: enough for a rate, and equal however it was computed."""
    return float(f"{rate:.5g}")


def search_seed(
    make: Callable[[float | None, int], Trial],
    seed: int,
    tolerance: float,
    start: float | None = None,
    step: float = _FIRST_STEP,
) -> Trials:
    """Brackets the capacity from `start` with growing steps, then bisects.

    Without a start the saturated throughput of the configuration gives one.
    """
    found = SeedCapacity(seed)
    floor = 0.0
    if start is None:
        (saturated,) = yield [make(None, seed)]
        start = 0.75 * saturated.throughput
        floor = _UNLOADED * saturated.throughput
    rate = rounded(start)
    yield from _bracket(make, found, rate, step, floor or rate * _UNLOADED)
    yield from _bisect(make, found, tolerance)
    return found


def _bisect(
    make: Callable[[float | None, int], Trial], found: SeedCapacity, tolerance: float
) -> Generator[Sequence[Trial], Sequence[TrialResult], None]:
    while found.low is not None and found.high is not None:
        if found.high / found.low <= 1 + tolerance:
            return
        middle = rounded(math.sqrt(found.low * found.high))
        if middle in found.tested:
            return
        yield from _test(make, found, middle)


def _bracket(
    make: Callable[[float | None, int], Trial],
    found: SeedCapacity,
    rate: float,
    step: float,
    floor: float,
) -> Generator[Sequence[Trial], Sequence[TrialResult], None]:
    floor = rounded(floor)
    yield from _test(make, found, rate)
    while found.low is None or found.high is None:
        if found.low is None and rate <= floor:
            # Not even an idle system is fast enough: one whole run says by how much.
            (found.tested[rate],) = yield [replace(make(rate, found.seed), early_stop=False)]
            return
        rate = rounded(rate * step if found.high is None else max(floor, rate / step))
        step = step**1.5
        yield from _test(make, found, rate)


def _test(
    make: Callable[[float | None, int], Trial], found: SeedCapacity, rate: float
) -> Generator[Sequence[Trial], Sequence[TrialResult], None]:
    (found.tested[rate],) = yield [make(rate, found.seed)]
    found.settle()


def check_around(
    make: Callable[[float | None, int], Trial], found: SeedCapacity, tolerance: float
) -> Trials:
    """Tests rates on both sides of a found capacity, and bisects again if it was not the first."""
    assert found.rate is not None
    rates = [rounded(found.rate * factor) for factor in _AROUND]
    fresh = [rate for rate in rates if rate not in found.tested]
    results = yield [make(rate, found.seed) for rate in fresh]
    found.tested.update(zip(fresh, results, strict=True))
    found.settle()
    if found.low is None and found.high is not None:
        below = rounded(found.high / _FIRST_STEP)
        yield from _bracket(make, found, below, _FIRST_STEP, below * _UNLOADED)
    yield from _bisect(make, found, tolerance)
    return found


def resume(
    make: Callable[[float | None, int], Trial],
    seeds: Sequence[int],
    start: float,
    tolerance: float,
) -> list[Trials]:
    """Searches of further seeds, which begin where another seed has found its capacity."""
    return [search_seed(make, seed, tolerance, start, 1 + 1.5 * tolerance) for seed in seeds]
