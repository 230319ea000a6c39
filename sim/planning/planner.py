"""The course of a study: a first look at every configuration, refinement, sizing, confirmation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from engine.core.errors import InputError
from sim.planning.capacity import SeedCapacity, check_around, resume, rounded, search_seed
from sim.planning.confirm import confirm
from sim.planning.entries import Entry, ranked, score
from sim.planning.interleave import Driver, Failure, Search, T
from sim.planning.result import Plan
from sim.planning.sampling import Source
from sim.planning.sizing import rate_check, size_search, variants
from sim.planning.space import Candidate, all_choices, candidate_of, impossible, merge_equal
from sim.planning.study import AUTO, Study
from sim.planning.tpe import sample_with_tpe
from sim.planning.trial import Trial, TrialResult

_SEEDS_PER_STUDY = 1000
# Of the seeds of a study these begin the ones for long runs, which no search may have seen.
_FIRST_CHECK, _LONG_SEARCH, _SECOND_CHECK = 500, 600, 700
_COARSE = 0.05
_MAX_ROUNDS = 6
# The saturated throughput is only where a search begins, so a shorter run will do.
_SATURATED = 0.25
_CURVE = (0.5, 0.75, 1.1, 1.3)


class Planner:
    """Carries out one study with a driver; `say` is told what happens next."""

    def __init__(
        self, study: Study, source: Source, driver: Driver, say: Callable[[str], None]
    ) -> None:
        self._study, self._source, self._driver, self._say = study, source, driver, say
        self._search = study.search
        self._warnings: dict[str, None] = {}
        first = study.search.seed * _SEEDS_PER_STUDY
        self._seeds = range(first, first + study.search.seeds)
        self._first_seed = first

    def plan(self) -> Plan:
        """Searches, ranks and confirms.

        Raises:
            InputError: no configuration of the space is possible.
        """
        possible, left_out = self._sorted_out()
        auto = AUTO in self._study.axes.get("replicas", ())
        if self._study.objective.kind == "min_cost" and not auto:
            entries = self._check_at_rate(possible)
        else:
            entries = self._first_look(possible)
            entries = self._refine(entries)
            if auto:
                entries = self._size(entries) + entries
        plan = Plan(self._study, self._source, ranked(entries, self._study), left_out)
        self._settle_best(plan)
        if self._search.verify_seeds:
            for _ in range(_MAX_ROUNDS):
                if plan.best is None or plan.best.capacity is None or plan.best.is_checked:
                    break
                self._confirm(plan.best)
                self._rank_anew(plan)
        self._draw_curves(plan.entries)
        plan.warnings = list(self._warnings)
        return plan

    # Parts ----------------------------------------------------------------------------------

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
        )

    def _maker(
        self, candidate: Candidate, factor: float = 1.0
    ) -> Callable[[float | None, int], Trial]:
        return lambda rate, seed: self.trial(candidate, rate, seed, factor)

    def _run(self, searches: Sequence[tuple[str, Search[T]]]) -> list[T | Failure]:
        return self._driver.run(searches)

    # Stages ---------------------------------------------------------------------------------

    def _sorted_out(self) -> tuple[list[Candidate], list[tuple[Candidate, str]]]:
        study = self._study
        possible, left_out = [], []
        chosen: Iterable[Candidate] = (candidate_of(study, one) for one in all_choices(study))
        for candidate in merge_equal(list(chosen)):
            reason = impossible(candidate)
            most = study.objective.max_gpus
            if reason is None and most is not None and candidate.num_gpus() > most:
                reason = f"needs {candidate.num_gpus()} GPUs, objective.max_gpus={most}"
            if reason is None:
                possible.append(candidate)
            else:
                left_out.append((candidate, reason))
        if not possible:
            count = f"none of {len(left_out)} configurations is possible; the first: "
            raise InputError(f"{study.path}: {count if len(left_out) > 1 else ''}{left_out[0][1]}")
        return possible, left_out

    def _first_look(self, candidates: list[Candidate]) -> list[Entry]:
        if self._search.method == "tpe":
            return sample_with_tpe(self._study, candidates, self._look)
        self._say(f"first look at {len(candidates)} configurations")
        return self._look(candidates)

    def _look(self, candidates: Sequence[Candidate]) -> list[Entry]:
        coarse = max(_COARSE, self._search.tolerance)
        searches = [
            (one.name, search_seed(self._maker(one), self._seeds[0], coarse)) for one in candidates
        ]
        return [
            _entry(candidate, answer)
            for candidate, answer in zip(candidates, self._run(searches), strict=True)
        ]

    def _refine(self, entries: list[Entry]) -> list[Entry]:
        best = [one for one in ranked(entries, self._study) if one.answered]
        best = best[: self._search.keep]
        self._say(f"refining {len(best)} of {len(entries)} with {len(self._seeds)} seeds")
        self._find_capacities([(entry, None) for entry in best])
        return entries

    def _find_capacities(
        self,
        wanted: Sequence[tuple[Entry, float | None]],
        factor: float = 1.0,
        seeds: range | None = None,
    ) -> None:
        """Finds the capacity of each with all seeds, near the start where one is given."""
        searches, owners = [], []
        seeds = self._seeds if seeds is None else seeds
        for entry, start in wanted:
            candidate = entry.candidate
            make, tolerance = self._maker(candidate, factor), self._search.tolerance
            around = start or entry.capacity
            assert around is not None
            others = resume(make, seeds[1:], rounded(around), tolerance)
            first = search_seed(make, seeds[0], tolerance, start, 1 + 1.5 * tolerance)
            if start is None:
                first = search_seed(make, seeds[0], tolerance)  # goes on from the first look
            for search in (first, *others):
                searches.append((candidate.name, search))
                owners.append(entry)
        answers = self._run(searches)
        for entry, _ in wanted:
            entry.seeds = []
        for entry, answer in zip(owners, answers, strict=True):
            _add(entry, answer)
        for entry, _ in wanted:
            entry.refuse_guesses()
        self._look_around([entry for entry, _ in wanted if entry.answered], factor)

    def _look_around(self, entries: Sequence[Entry], factor: float) -> None:
        """Tests rates below and above the capacity with the first seed."""
        before = [entry.seeds[0].rate for entry in entries]
        searches = [
            (
                entry.candidate.name,
                check_around(
                    self._maker(entry.candidate, factor), entry.seeds[0], self._search.tolerance
                ),
            )
            for entry in entries
        ]
        for entry, rate, answer in zip(entries, before, self._run(searches), strict=True):
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

    def _size(self, entries: Sequence[Entry]) -> list[Entry]:
        """Fleet sizes for the objective's rate, for each router."""
        study = self._study
        rate = study.objective.rate
        assert rate is not None
        refined = [entry for entry in entries if len(entry.seeds) > 1 and entry.answered]
        self._say(f"sizing {len(refined)} configurations for {rate:g} {self._source.rate_unit}")
        searches, found = [], []
        for entry in refined:
            assert entry.capacity is not None
            for variant in variants(study, entry.candidate):
                search = size_search(
                    self._maker, variant, rate, entry.capacity, self._seeds, study.objective
                )
                searches.append((variant.name, search))
        for answer in self._run(searches):
            if not isinstance(answer, Failure):
                found += answer
        for entry in found:
            entry.refuse_guesses()
        return merge_entries(found)

    def _check_at_rate(self, candidates: Sequence[Candidate]) -> list[Entry]:
        rate = self._study.objective.rate
        assert rate is not None
        self._say(f"testing {len(candidates)} configurations at {rate:g}")
        searches = [
            (one.name, rate_check(self._maker(one), rate, self._seeds)) for one in candidates
        ]
        entries = []
        for candidate, answer in zip(candidates, self._run(searches), strict=True):
            entry = Entry(candidate)
            if isinstance(answer, Failure):
                entry.failure = answer.reason
            else:
                entry.at_rate = answer
                entry.refuse_guesses()
            entries.append(entry)
        return entries

    def _settle_best(self, plan: Plan) -> None:
        """For `min_cost`: the capacity of the cheapest, which must exceed the rate for sure."""
        study = self._study
        rate = study.objective.rate
        if rate is None:
            return
        while (best := plan.best) is not None:
            if len(best.seeds) < 2:
                self._say(f"capacity of {best.candidate.name}")
                self._find_capacities([(best, rounded(0.97 * (best.hint or 1.1 * rate)))])
            interval = best.interval(study)
            if interval is None or interval.low >= rate:
                break
            best.uncertain = True
            best.notes.append(
                f"serves {rate:g} in the runs at it, but with less than"
                f" {study.search.confidence:.0%} confidence"
            )
            self._grow(plan, best)
        plan.entries = ranked(plan.entries, study)

    def _grow(self, plan: Plan, entry: Entry) -> None:
        """Tries one copy more than in an entry that turned out too small."""
        study = self._study
        larger = entry.candidate.scaled(entry.candidate.replicas + 1)
        known = any(one.candidate == larger for one in plan.entries)
        if AUTO in study.axes.get("replicas", ()) and not known:
            rate, hint = study.objective.rate, None
            assert rate is not None
            if entry.capacity is not None:
                hint = entry.capacity * larger.replicas / entry.candidate.replicas
            search = rate_check(self._maker(larger), rate, self._seeds)
            (answer,) = self._run([(larger.name, search)])
            if not isinstance(answer, Failure):
                grown = Entry(larger, at_rate=answer, hint=hint)
                grown.refuse_guesses()
                plan.entries.append(grown)
        plan.entries = ranked(plan.entries, study)

    def _confirm(self, entry: Entry) -> None:
        """Long runs with fresh seeds; a capacity that they contradict is sought once with such."""
        assert entry.capacity is not None
        self._say(f"confirming {entry.capacity:.4g} with long runs and fresh seeds")
        known = entry.searched
        begin = self._first_seed + (_FIRST_CHECK if known is None else _SECOND_CHECK)
        entry.confirmation = confirm(
            self._maker(entry.candidate, self._search.verify_factor),
            entry.capacity,
            known or entry.capacity,
            range(begin, begin + self._search.verify_seeds),
            self._run,
            entry.candidate.name,
        )
        confirmation = entry.confirmation
        if confirmation.confirmed or confirmation.error is not None or known is not None:
            return
        self._say(f"contradicted: {confirmation.found}; searching anew with long runs")
        self._search_anew(entry)

    def _search_anew(self, entry: Entry) -> None:
        """The capacity by long runs, which takes the place of the one that they contradicted."""
        search, before, capacity = self._search, entry.seeds, entry.capacity
        assert capacity is not None
        begin = self._first_seed + _LONG_SEARCH
        long = Entry(entry.candidate)
        seeds = range(begin, begin + max(2, search.verify_seeds))
        self._find_capacities([(long, rounded(capacity))], search.verify_factor, seeds)
        if long.failure is not None:
            entry.notes.append(f"no capacity by long runs: {long.failure}")
            return
        entry.searched, entry.seeds = capacity, long.seeds or before
        entry.notes += long.notes
        found = "none" if entry.capacity is None else f"{entry.capacity:.4g}"
        entry.notes.append(f"long runs contradicted {capacity:.4g}; by them it is {found}")

    def _rank_anew(self, plan: Plan) -> None:
        """Ranks by what is known now, and refines what may have become the best by that."""
        plan.entries = ranked(plan.entries, self._study)
        self._settle_best(plan)
        while self._study.objective.rate is None:
            best = next((one for one in plan.entries if len(one.seeds) > 1), None)
            least = -math.inf if best is None else score(best, self._study)
            rivals = [
                one
                for one in plan.entries
                if one.answered and len(one.seeds) == 1 and score(one, self._study) > least
            ]
            if not rivals:
                break
            self._say(f"refining {rivals[0].candidate.name}, now the best by its first look")
            self._find_capacities([(rivals[0], None)])
            plan.entries = ranked(plan.entries, self._study)

    def _draw_curves(self, entries: Sequence[Entry]) -> None:
        """Whole runs on both sides of the capacity, for the plots."""
        wanted = [one for one in entries if len(one.seeds) > 1 and one.answered]
        if not wanted:
            return
        self._say("drawing curves")
        searches = [(one.candidate.name, self._curve(one)) for one in wanted]
        for entry, answer in zip(wanted, self._run(searches), strict=True):
            if not isinstance(answer, Failure):
                entry.curve = answer

    def _curve(self, entry: Entry) -> Search[list[TrialResult]]:
        assert entry.capacity is not None
        make, seed = self._maker(entry.candidate), self._seeds[0]
        rates = [rounded(entry.capacity * factor) for factor in _CURVE]
        results = yield [replace(make(rate, seed), early_stop=False) for rate in rates]
        return list(results)


def merge_entries(entries: Iterable[Entry]) -> list[Entry]:
    """One entry per configuration."""
    merged: dict[Candidate, Entry] = {}
    for entry in entries:
        merged.setdefault(entry.candidate, entry)
    return list(merged.values())


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
