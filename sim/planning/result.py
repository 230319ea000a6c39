"""The answer to a study, before it becomes words, a table or JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sim.planning.confirm import Confirmation
from sim.planning.entries import Entry
from sim.planning.sampling import Source
from sim.planning.space import Candidate
from sim.planning.study import Study

# What a run's slowest process is called.
_SLOW = {"session": "a session", "request": "a request", "queue": "what the queue remembers"}


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
        return best.confirmation.doubt or self._too_little(best)

    def _too_little(self, best: Entry) -> str | None:
        """Which budget ended before the capacity was known well enough, and what it would take."""
        search, short = self.study.search, best.unsteady
        if short is not None:
            need = short.num_requests * search.multiple * short.scale_s / short.span_s
            return (
                "its runs are too short for a steady state: the slowest process,"
                f" {_SLOW[short.scale]}, takes {short.scale_s:.3g} s, and {search.multiple:g} times"
                f" that are about {need:,.0f} requests; search.longest allows"
                f" {short.num_requests:,}"
            )
        interval = best.interval(self.study)
        if interval is None or interval.is_useful(search.width):
            return None
        count = len(best.seeds)
        need = count * (interval.half / (search.width * interval.mean)) ** 2
        return (
            f"its interval is wider than {search.width:.3g} of it on each side after {count}"
            f" seeds, all that search.max_seeds allows; about {math.ceil(need)} would do, or"
            " longer runs"
        )
