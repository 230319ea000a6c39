"""Confirms a capacity by long runs with seeds that the search has not seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sim.planning.capacity import rounded
from sim.planning.interleave import Failure, Search, T
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
    """Long runs below and above a capacity.

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
            f"SLO met in {below} of {len(self.below)} at {BELOW:g} x, missed in"
            f" {above} of {len(self.above)} at {ABOVE:g} x"
        )


def confirm(
    make: Make, capacity: float, searched: float, seeds: Sequence[int], run: Run, name: str
) -> Confirmation:
    """Runs each of `seeds` below and above a capacity."""
    rates = (rounded(BELOW * capacity), rounded(ABOVE * capacity))

    def both() -> Search[list[TrialResult]]:
        results = yield [make(rate, seed) for rate in rates for seed in seeds]
        return list(results)

    (answer,) = run([(name, both())])
    if isinstance(answer, Failure):
        return Confirmation(searched, capacity, (), (), answer.reason)
    half = len(seeds)
    return Confirmation(searched, capacity, tuple(answer[:half]), tuple(answer[half:]))
