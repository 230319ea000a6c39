"""The course of a study: a first look at every configuration, refinement, sizing, confirmation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from engine.core.errors import InputError
from sim.planning.capacity import rounded
from sim.planning.confirm import confirm
from sim.planning.entries import Entry, ranked, score
from sim.planning.fallback import unlike_costs
from sim.planning.finder import Finder
from sim.planning.interleave import Failure
from sim.planning.result import Plan
from sim.planning.sizing import rate_check, size_search, variants
from sim.planning.space import Candidate, all_choices, candidate_of, impossible, merge_equal
from sim.planning.study import AUTO
from sim.planning.tpe import sample_with_tpe

# Of the seeds of a study these begin the ones for long runs, which no search may have seen.
_FIRST_CHECK, _LONG_SEARCH, _SECOND_CHECK = 500, 600, 700
_MAX_ROUNDS = 6


class Planner(Finder):
    """Carries out one study with a driver; `say` is told what happens next."""

    def plan(self) -> Plan:
        """Searches, ranks and confirms.

        Raises:
            InputError: no configuration of the space is possible.
        """
        possible, left_out = self._sorted_out()
        auto = AUTO in self._study.axes.get("replicas", ())
        if self._study.objective.kind == "min_cost" and not auto:
            entries = self.check_at_rate(possible)
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
        self.draw_curves(plan.entries)
        unlike = unlike_costs(plan.entries)
        plan.warnings = [*self._warnings, *([unlike] if unlike else [])]
        return plan

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
            return sample_with_tpe(self._study, candidates, self.look)
        self._say(f"first look at {len(candidates)} configurations")
        return self.look(candidates)

    def _refine(self, entries: list[Entry]) -> list[Entry]:
        best = [one for one in ranked(entries, self._study) if one.answered]
        best = best[: self._search.keep]
        self._say(f"refining {len(best)} of {len(entries)} with {len(self._seeds)} seeds")
        self.find_capacities([(entry, None) for entry in best])
        return entries

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
                    self.maker, variant, rate, entry.capacity, self._seeds, study.objective
                )
                searches.append((variant.name, search))
        for answer in self.run(searches):
            if not isinstance(answer, Failure):
                found += answer
        return merge_entries(self.without_guesses(found))

    def _settle_best(self, plan: Plan) -> None:
        """For `min_cost`: the capacity of the cheapest, which must exceed the rate for sure."""
        study = self._study
        rate = study.objective.rate
        if rate is None:
            return
        while (best := plan.best) is not None:
            if len(best.seeds) < 2:
                self._say(f"capacity of {best.candidate.name}")
                self.find_capacities([(best, rounded(0.97 * (best.hint or 1.1 * rate)))])
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
            search = rate_check(self.maker(larger), rate, self._seeds)
            (answer,) = self.run([(larger.name, search)])
            if not isinstance(answer, Failure):
                grown = Entry(larger, at_rate=answer, hint=hint)
                plan.entries += self.without_guesses([grown])
        plan.entries = ranked(plan.entries, study)

    def _confirm(self, entry: Entry) -> None:
        """Long runs with fresh seeds; a capacity that they contradict is sought once with such."""
        assert entry.capacity is not None
        self._say(f"confirming {entry.capacity:.4g} with long runs and fresh seeds")
        known = entry.searched
        begin = self._first_seed + (_FIRST_CHECK if known is None else _SECOND_CHECK)
        interval = entry.interval(self._study)
        entry.confirmation = confirm(
            self.maker(entry.candidate, self._search.verify_factor * entry.stretch),
            entry.capacity,
            (entry.capacity, entry.capacity) if interval is None else (interval.low, interval.high),
            known or entry.capacity,
            range(begin, begin + self._search.verify_seeds),
            self.run,
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
        factor = search.verify_factor * entry.stretch
        self.find_capacities([(long, rounded(capacity))], factor, begin)
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
            self.find_capacities([(rivals[0], None)])
            plan.entries = ranked(plan.entries, self._study)


def merge_entries(entries: Iterable[Entry]) -> list[Entry]:
    """One entry per configuration."""
    merged: dict[Candidate, Entry] = {}
    for entry in entries:
        merged.setdefault(entry.candidate, entry)
    return list(merged.values())
