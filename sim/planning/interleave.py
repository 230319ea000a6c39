"""Runs many searches at once on one executor.

A search is a generator: it yields the trials that it wants next and is sent their results. What
it decides depends on its own results only, never on their order in time, so any executor leads
to the same answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from engine.core.errors import LockstepError
from sim.planning.cache import ResultCache
from sim.planning.executors import Executor
from sim.planning.trial import Trial, TrialResult

T = TypeVar("T")
Search = Generator[Sequence[Trial], Sequence[TrialResult], T]


class TrialFailed(LockstepError):
    """A trial that a search cannot do without has failed."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A search that ended without an answer."""

    reason: str


@dataclass(slots=True, eq=False)
class _Active(Generic[T]):
    """A search that waits for trials, until `answers` holds its one answer."""

    name: str
    search: Search[T]
    keys: list[str] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    answers: list[T | Failure] = field(default_factory=list)


class Driver:
    """Feeds an executor from searches; `on_trial(name, trial, result, cached)` is told of each.

    `on_answer(answered, searches)` is told how many searches have their answer.
    """

    def __init__(
        self,
        executor: Executor[Trial, TrialResult],
        cache: ResultCache,
        on_trial: Callable[[str, Trial, TrialResult, bool], None] | None = None,
        on_answer: Callable[[int, int], None] | None = None,
    ) -> None:
        self._executor, self._cache, self._on_trial = executor, cache, on_trial
        self._on_answer = on_answer
        self._results: dict[str, TrialResult] = {}
        self._waiting: deque[tuple[str, Trial]] = deque()
        self._running: dict[str, Trial] = {}
        self._wanted: dict[str, list[_Active[Any]]] = {}

    def run(self, searches: Sequence[tuple[str, Search[T]]]) -> list[T | Failure]:
        """The answers in the order of the searches; a `Failure` where one could not go on."""
        active = [_Active(name, search) for name, search in searches]
        for started in active:
            self._advance(started, None)
        while not all(one.answers for one in active):
            while self._waiting and self._executor.has_room():
                key, trial = self._waiting.popleft()
                self._running[key] = trial
                self._executor.submit(key, trial)
            key, result = self._executor.next_result()
            trial = self._running.pop(key)
            self._cache.put(key, result)
            self._results[key] = result
            searchers = self._wanted.pop(key)
            if self._on_answer is not None:
                self._on_answer(sum(bool(one.answers) for one in active), len(active))
            self._tell(searchers[0].name, trial, result, False)
            for one in searchers:
                one.missing.discard(key)
                if not one.missing:
                    found = [self._results[name] for name in one.keys]
                    self._advance(one, found)
        return [one.answers[0] for one in active]

    def _advance(self, one: _Active[T], results: Sequence[TrialResult] | None) -> None:
        """Sends results to a search until it waits for a trial that must be run."""
        try:
            while True:
                failed = next((r.error for r in results or () if r.error is not None), None)
                if failed is not None:
                    wanted = one.search.throw(TrialFailed(failed))
                else:
                    wanted = next(one.search) if results is None else one.search.send(results)
                one.keys = [self._request(one, trial) for trial in wanted]
                if one.missing:
                    return
                results = [self._results[key] for key in one.keys]
        except StopIteration as stop:
            one.answers.append(stop.value)
        except LockstepError as error:
            one.answers.append(Failure(str(error)))

    def _request(self, one: _Active[T], trial: Trial) -> str:
        key = self._cache.key(trial)
        if key in self._results:
            return key
        if key not in self._wanted:
            found = self._cache.get(key)
            if found is not None:
                self._results[key] = found
                self._tell(one.name, trial, found, True)
                return key
            self._wanted[key] = []
            self._waiting.append((key, trial))
        if key not in one.missing:
            self._wanted[key].append(one)
            one.missing.add(key)
        return key

    def _tell(self, name: str, trial: Trial, result: TrialResult, cached: bool) -> None:
        if self._on_trial is not None:
            self._on_trial(name, trial, result, cached)
