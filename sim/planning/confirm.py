"""Confirms a capacity by long runs with seeds that the search has not seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sim.planning.capacity import rounded
from sim.planning.interleave import Failure, Search, T
from sim.planning.trial import Trial, TrialResult

BELOW, ABOVE = 0.97, 1.05
_LEAST = 0.1
Make = Callable[[float | None, int], Trial]


class Run(Protocol):
    """Carries out searches, as `Driver.run` does."""

    def __call__(self, searches: Sequence[tuple[str, Search[T]]], /) -> list[T | Failure]:
        """The answers in the order of the searches."""
        ...


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Long runs below and above a capacity: at 0.97 and 1.05 times it, or outside its interval.

    `capacity` is the one that these runs are about. It differs from the first search's, `searched`,
    if long runs contradicted that one.
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

    @property
    def doubt(self) -> str | None:
        """What long runs with fresh seeds showed against the capacity, or None."""
        if self.error is not None:
            return f"long runs with fresh seeds failed ({self.error})"
        return (
            None if self.confirmed else f"long runs with fresh seeds contradict it ({self.found})"
        )

    @property
    def found(self) -> str:
        """How many runs were as they should be."""
        below = sum(run.met for run in self.below)
        above = sum(not run.met for run in self.above)
        return (
            f"SLO met in {below} of {len(self.below)} at {self.below[0].rate or 0:.4g}, missed in"
            f" {above} of {len(self.above)} at {self.above[0].rate or 0:.4g}"
        )


def confirm(
    make: Make,
    capacity: float,
    bounds: tuple[float, float],
    searched: float,
    seeds: Sequence[int],
    run: Run,
    name: str,
) -> Confirmation:
    """Runs each of `seeds` below and above a capacity, and outside the bounds of its interval."""
    low, high = bounds
    least = _LEAST * capacity  # an interval down to 0 has no rate below it
    rates = (
        rounded(max(least, min(BELOW * capacity, low))),
        rounded(max(ABOVE * capacity, high)),
    )

    def both() -> Search[list[TrialResult]]:
        results = yield [make(rate, seed) for rate in rates for seed in seeds]
        return list(results)

    (answer,) = run([(name, both())])
    if isinstance(answer, Failure):
        return Confirmation(searched, capacity, (), (), answer.reason)
    half = len(seeds)
    return Confirmation(searched, capacity, tuple(answer[:half]), tuple(answer[half:]))
