"""What the stages of a study are made of: runs, capacities of configurations, curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from sim.planning.capacity import (
    SeedCapacity,
    check_around,
    is_beaten,
    resume,
    rounded,
    search_seed,
)
from sim.planning.entries import Entry, ranked
from sim.planning.fallback import fall_back
from sim.planning.interleave import Driver, Failure, Search, T
from sim.planning.sampling import Source
from sim.planning.sizing import rate_check
from sim.planning.space import Candidate
from sim.planning.study import Study
from sim.planning.trial import Trial, TrialResult

_SEEDS_PER_STUDY = 1000
_COARSE = 0.05
# The saturated throughput is only where a search begins, so a shorter run will do.
_SATURATED = 0.25
_MORE_SEEDS = 2
_CURVE = (0.5, 0.75, 1.1, 1.3)


class Finder:
    """Runs the searches of a study with a driver; `say` is told what happens next."""

    def __init__(
        self, study: Study, source: Source, driver: Driver, say: Callable[[str], None]
    ) -> None:
        self._study, self._source, self._driver, self._say = study, source, driver, say
        self._search = study.search
        self._warnings: dict[str, None] = {}
        first = study.search.seed * _SEEDS_PER_STUDY
        self._seeds = range(first, first + study.search.seeds)
        self._first_seed = first

    def trial(self, candidate: Candidate, rate: float | None, seed: int, factor: float) -> Trial:
        """A run; `factor` lengthens it."""
        search = self._search
        if rate is None:
            factor *= _SATURATED
        count = math.ceil(search.requests * candidate.num_fronts * factor)
        base = self._source.base
        if base is not None and base.hashed is not None and count > len(base):
            count = len(base)
            self._warnings[
                f"{base.name} has {count} requests, and their prefixes cannot be repeated: runs"
                " that need more take them all, so that seeds differ in drawn arrivals only"
            ] = None
        return Trial(
            candidate,
            rate,
            seed,
            count,
            self._study.slo,
            self._study.link,
            search.warmup,
            search.cooldown,
            multiple=search.multiple,
            most_requests=math.ceil(search.requests * candidate.num_fronts * search.longest),
        )

    def maker(
        self, candidate: Candidate, factor: float = 1.0
    ) -> Callable[[float | None, int], Trial]:
        """What makes the trials of a configuration; `factor` lengthens them."""
        return lambda rate, seed: self.trial(candidate, rate, seed, factor)

    def run(self, searches: Sequence[tuple[str, Search[T]]]) -> list[T | Failure]:
        """The answers in the order of the searches."""
        return self._driver.run(searches)

    def look(self, candidates: Sequence[Candidate]) -> list[Entry]:
        """Every configuration with one seed and a coarse tolerance."""
        coarse = max(_COARSE, self._search.tolerance)
        searches = [
            (one.name, search_seed(self.maker(one), self._seeds[0], coarse)) for one in candidates
        ]
        entries = [
            _entry(candidate, answer)
            for candidate, answer in zip(candidates, self.run(searches), strict=True)
        ]
        again = [entry for entry in entries if fall_back(entry)]
        if again:
            self._say(f"{len(again)} left the calibrated range, and are run with other costs")
            for entry, other in zip(again, self.look([e.candidate for e in again]), strict=True):
                entry.become(other)
        return entries

    def find_capacities(
        self,
        wanted: Sequence[tuple[Entry, float | None]],
        factor: float = 1.0,
        first_seed: int | None = None,
    ) -> None:
        """Finds the capacity of each with as many seeds as it takes, or as the study allows.

        The search is near the start where one is given. All of the wanted have runs as long as
        that one needs whose slowest process is the longest, so that they meet the same requests.
        """
        begin = self._first_seed if first_seed is None else first_seed
        starts = [start or entry.capacity for entry, start in wanted]
        lengths = [self._lengthened(entry) for entry, _ in wanted]
        lengthened = max([factor, *lengths])
        num_seeds = self._search.seeds
        for entry, _ in wanted:
            entry.seeds, entry.stretch = [], lengthened
        self._add_seeds([entry for entry, _ in wanted], starts, begin, num_seeds, lengthened)
        again = []
        for (entry, _), start in zip(wanted, starts, strict=True):
            around = entry.capacity or start
            entry.refuse_guesses()
            if fall_back(entry):
                again.append((entry, around))
        fine = [entry for entry, _ in wanted if entry.answered]
        if again:
            self.find_capacities(again, factor, first_seed)
        self._look_around(fine, lengthened)
        self._sharpen(fine, begin, lengthened)

    def _lengthened(self, entry: Entry) -> float:
        """How many times as many requests as the study asks for its runs turned out to need."""
        asked = math.ceil(self._search.requests * entry.candidate.num_fronts)
        return max((run.num_requests for run in entry.runs_at_capacity()), default=asked) / asked

    def _add_seeds(
        self,
        entries: Sequence[Entry],
        starts: Sequence[float | None],
        begin: int,
        count: int,
        factor: float,
    ) -> None:
        """Searches with the next `count` seeds of each, from `begin` on."""
        searches, owners = [], []
        tolerance = self._search.tolerance
        for entry, start in zip(entries, starts, strict=True):
            assert start is not None
            first = begin + len(entry.seeds)
            make = self.maker(entry.candidate, factor)
            for search in resume(make, range(first, first + count), rounded(start), tolerance):
                searches.append((entry.candidate.name, search))
                owners.append(entry)
        for entry, answer in zip(owners, self.run(searches), strict=True):
            _add(entry, answer)

    def _sharpen(self, entries: Sequence[Entry], begin: int, factor: float) -> None:
        """Adds seeds to what may be the best, until its interval is useful or none are left."""
        study, search = self._study, self._search
        while True:
            answered = ranked([entry for entry in entries if entry.answered], study)
            wide = [
                entry
                for entry in answered
                if len(entry.seeds) < search.max_seeds
                and not self._is_sharp(entry)
                and not is_beaten(entry.scores(study), answered[0].scores(study), search.confidence)
            ]
            if not wide:
                return
            count = min(_MORE_SEEDS, search.max_seeds - max(len(entry.seeds) for entry in wide))
            self._say(
                f"{count} more seeds for {len(wide)} of {len(entries)}:"
                f" {wide[0].candidate.name} has {len(wide[0].seeds)}"
            )
            self._add_seeds(wide, [entry.capacity for entry in wide], begin, count, factor)

    def _is_sharp(self, entry: Entry) -> bool:
        interval = entry.interval(self._study)
        return interval is None or interval.is_useful(self._search.width)

    def _look_around(self, entries: Sequence[Entry], factor: float) -> None:
        """Tests rates below and above the capacity with the first seed."""
        before = [entry.seeds[0].rate for entry in entries]
        searches = [
            (
                entry.candidate.name,
                check_around(
                    self.maker(entry.candidate, factor), entry.seeds[0], self._search.tolerance
                ),
            )
            for entry in entries
        ]
        for entry, rate, answer in zip(entries, before, self.run(searches), strict=True):
            if isinstance(answer, Failure):
                entry.notes.append(f"rates around the capacity were not tested: {answer.reason}")
                continue
            if entry.seeds[0].rate != rate:
                entry.notes.append(
                    f"not monotone: a rate below {rate:.4g} missed the SLO, so seed"
                    f" {entry.seeds[0].seed} counts with {entry.seeds[0].rate or 0:.4g}"
                )
            for island in entry.seeds[0].islands:
                entry.notes.append(f"not monotone: {island:.4g} met the SLO again")

    def check_at_rate(self, candidates: Sequence[Candidate]) -> list[Entry]:
        """Runs every configuration at the objective's rate."""
        rate = self._study.objective.rate
        assert rate is not None
        self._say(f"testing {len(candidates)} configurations at {rate:g}")
        searches = [
            (one.name, rate_check(self.maker(one), rate, self._seeds)) for one in candidates
        ]
        entries = []
        for candidate, answer in zip(candidates, self.run(searches), strict=True):
            entry = Entry(candidate)
            if isinstance(answer, Failure):
                entry.failure = answer.reason
            else:
                entry.at_rate = answer
            entries.append(entry)
        return self.without_guesses(entries)

    def without_guesses(self, entries: list[Entry]) -> list[Entry]:
        """Entries with runs at the rate, those beyond a cost model's range run with the next."""
        for entry in entries:
            entry.refuse_guesses()
        again = [entry for entry in entries if fall_back(entry)]
        if again:
            others = self.check_at_rate([entry.candidate for entry in again])
            for entry, other in zip(again, others, strict=True):
                entry.become(other)
        return entries

    def draw_curves(self, entries: Sequence[Entry]) -> None:
        """Whole runs on both sides of the capacity, for the plots."""
        wanted = [one for one in entries if len(one.seeds) > 1 and one.answered]
        if not wanted:
            return
        self._say("drawing curves")
        searches = [(one.candidate.name, self._curve(one)) for one in wanted]
        for entry, answer in zip(wanted, self.run(searches), strict=True):
            if not isinstance(answer, Failure):
                entry.curve = answer

    def _curve(self, entry: Entry) -> Search[list[TrialResult]]:
        assert entry.capacity is not None
        make, seed = self.maker(entry.candidate, entry.stretch), self._seeds[0]
        rates = [rounded(entry.capacity * factor) for factor in _CURVE]
        results = yield [replace(make(rate, seed), early_stop=False) for rate in rates]
        return list(results)


def _entry(candidate: Candidate, answer: SeedCapacity | Failure) -> Entry:
    entry = Entry(candidate)
    _add(entry, answer)
    entry.refuse_guesses()
    return entry


def _add(entry: Entry, answer: SeedCapacity | Failure) -> None:
    if isinstance(answer, Failure):
        entry.failure = answer.reason
    else:
        entry.seeds.append(answer)
