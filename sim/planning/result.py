"""The answer to a study, before it becomes words, a table or JSON."""

from __future__ import annotations

from dataclasses import dataclass, field

from sim.planning.confirm import Confirmation
from sim.planning.entries import Entry
from sim.planning.sampling import Source
from sim.planning.space import Candidate
from sim.planning.study import Study


@dataclass(slots=True)
class Plan:
    """All configurations, best first, and what is to be said about them."""

    study: Study
    source: Source
    entries: list[Entry]
    left_out: list[tuple[Candidate, str]]
    warnings: list[str] = field(default_factory=list)

    @property
    def best(self) -> Entry | None:
        """The best configuration, or None if nothing meets the SLO (at the rate)."""
        first = self.entries[0] if self.entries else None
        if first is None or first.failure is not None:
            return None
        if self.study.objective.kind == "min_cost":
            return first if first.serves else None
        return first if first.capacity is not None else None

    @property
    def confirmation(self) -> Confirmation | None:
        """That of the best configuration; None where none was asked for."""
        return None if self.best is None else self.best.confirmation

    @property
    def doubt(self) -> str | None:
        """Why the best configuration's capacity does not hold for sure, or None."""
        best = self.best
        if best is None or not self.study.search.verify_seeds:
            return None
        if best.capacity is None:
            return "its capacity was not found"
        if best.confirmation is None or not best.is_checked:
            return "the rounds of confirmation ended before its turn"
        return best.confirmation.doubt
