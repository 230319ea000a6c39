"""Confirms a capacity by long runs with seeds that the search has not seen."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sim.planning.capacity import SeedCapacity, resume, rounded
from sim.planning.interleave import Failure, Search, T
from sim.planning.study import SearchSpec
from sim.planning.trial import Trial, TrialResult

BELOW, ABOVE = 0.97, 1.05
Make = Callable[[float | None, int], Trial]


class Run(Protocol):
    """Carries out searches, as `Driver.run` does."""

    def __call__(self, searches: Sequence[tuple[str, Search[T]]], /) -> list[T | Failure]:
        """The answers in the order of the searches."""
        ...


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Long runs at 0.97 and 1.05 times a capacity.

    `capacity` is the one that these runs are about. It differs from the search's, `searched`, if
    long runs contradicted that one; then it is the mean capacity of long runs.
    """

    searched: float
    capacity: float
    below: tuple[TrialResult, ...]
    above: tuple[TrialResult, ...]
    error: str | None = None

    @property
    def confirmed(self) -> bool:
        """Every run below met the SLO and every run above missed it."""
        if self.error is not None or not self.below:
            return False
        return all(run.met for run in self.below) and not any(run.met for run in self.above)


def confirm(
    make: Make, capacity: float, search: SearchSpec, first_seed: int, run: Run, name: str
) -> Confirmation:
    """Confirms a capacity; one that fails is measured again with long runs, and confirmed anew."""
    count = search.verify_seeds
    seeds = range(first_seed, first_seed + count)
    confirmation = _check(make, capacity, capacity, seeds, run, name)
    if confirmation.confirmed or confirmation.error is not None:
        return confirmation
    searches = resume(make, seeds, rounded(capacity), search.tolerance)
    answers = run([(name, one) for one in searches])
    rates = [one.rate for one in answers if isinstance(one, SeedCapacity) and one.rate is not None]
    if len(rates) < count:
        return confirmation
    fresh = range(first_seed + count, first_seed + 2 * count)
    return _check(make, statistics.fmean(rates), capacity, fresh, run, name)


def _check(
    make: Make, capacity: float, searched: float, seeds: Sequence[int], run: Run, name: str
) -> Confirmation:
    rates = (rounded(BELOW * capacity), rounded(ABOVE * capacity))

    def both() -> Search[list[TrialResult]]:
        results = yield [make(rate, seed) for rate in rates for seed in seeds]
        return list(results)

    (answer,) = run([(name, both())])
    if isinstance(answer, Failure):
        return Confirmation(searched, capacity, (), (), answer.reason)
    half = len(seeds)
    return Confirmation(searched, capacity, tuple(answer[:half]), tuple(answer[half:]))
