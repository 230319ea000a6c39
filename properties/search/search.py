"""The search: random small workloads, as many as the time allows, every step checked.

Every workload runs under the follower. One in eight also runs beside the naive reference and the
state audit, one in sixteen with asynchronous scheduling and one in sixteen perturbed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

from properties.defects.perturb import Perturbed
from properties.follower.goals import GOALS
from properties.follower.view import LawBroken
from properties.search.failures import KERNEL, load_factory
from properties.search.run import Factory, kernel, run_workload
from properties.search.workloads import Workload, random_workload

CHUNK = 500
SEED_STRIDE = 1_000_003
# Fewer workloads than this need not meet all goals.
GOALS_DUE = 20_000


@dataclass
class SearchResult:
    """What a search did; failures are (workload seed, mode, law, detail)."""

    workloads: int = 0
    steps: int = 0
    thorough: int = 0
    seconds: float = 0.0
    by_policy: Counter[str] = field(default_factory=Counter)
    goals: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str, str, str]] = field(default_factory=list)

    def merge(self, other: SearchResult) -> None:
        """Adds the result of another part."""
        self.workloads += other.workloads
        self.steps += other.steps
        self.thorough += other.thorough
        self.by_policy.update(other.by_policy)
        self.goals.update(other.goals)
        self.failures += other.failures

    @property
    def missed_goals(self) -> list[str]:
        """Goals that a search of this size should have met and did not."""
        if self.workloads < GOALS_DUE:
            return []
        return [goal for goal in GOALS if not self.goals[goal]]


def mode_of(seed: int, only_async: bool = False) -> str:
    """How a workload is run; a function of its seed, so that a replay needs nothing else.

    All but `plain` ones are also judged by the state's audit and the naive reference.
    """
    if only_async:
        return "async" if seed % 4 == 0 else "plain"
    return {0: "thorough", 8: "thorough", 5: "async", 11: "perturbed"}.get(seed % 16, "plain")


def workload_of_seed(seed: int, policy: str | None = None, only_async: bool = False) -> Workload:
    """The workload that the search runs for a seed."""
    return random_workload(seed, policy, is_async=only_async or mode_of(seed) == "async")


def search_chunk(
    target: str, first: int, count: int, policy: str | None, only_async: bool = False
) -> SearchResult:
    """Runs `count` consecutive seeds; in a worker process."""
    chosen: Factory = kernel if target == KERNEL else load_factory(target)
    result = SearchResult()
    for seed in range(first, first + count):
        mode = mode_of(seed, only_async)
        workload = workload_of_seed(seed, policy, only_async)
        factory = Perturbed if mode == "perturbed" and target == KERNEL else chosen
        result.workloads += 1
        result.thorough += mode != "plain"
        result.by_policy[workload.config.policy] += 1
        try:
            follower = run_workload(
                workload,
                factory,  # type: ignore[arg-type]
                thorough=mode != "plain",
                perturbed=mode == "perturbed",
            )
        except LawBroken as broken:
            result.failures.append((seed, mode, broken.law, broken.detail))
            continue
        result.steps += follower.ledger.steps
        result.goals.update(follower.ledger.goals)
    return result


def search(
    seed: int,
    seconds: float | None = None,
    workloads: int | None = None,
    jobs: int = 1,
    policy: str | None = None,
    target: str = KERNEL,
    max_failures: int = 20,
    only_async: bool = False,
) -> SearchResult:
    """Searches until the time or the number of workloads is used up, or too much has failed."""
    total = SearchResult()
    began = time.perf_counter()
    run = partial(search_chunk, target, policy=policy, only_async=only_async)

    def over() -> bool:
        late = seconds is not None and time.perf_counter() - began >= seconds
        return late or len(total.failures) >= max_failures

    chunks = _chunks(seed * SEED_STRIDE, workloads)
    if jobs == 1:
        for first, count in chunks:
            if over():
                break
            total.merge(run(first, count))
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            _search_parallel(pool, run, chunks, jobs, total, over)
    total.seconds = time.perf_counter() - began
    total.failures.sort()
    return total


def _chunks(first: int, workloads: int | None) -> Iterator[tuple[int, int]]:
    done = 0
    while workloads is None or done < workloads:
        count = CHUNK if workloads is None else min(CHUNK, workloads - done)
        yield first + done, count
        done += count


def _search_parallel(
    pool: ProcessPoolExecutor,
    run: Callable[[int, int], SearchResult],
    chunks: Iterator[tuple[int, int]],
    jobs: int,
    total: SearchResult,
    over: Callable[[], bool],
) -> None:
    pending: set[Future[SearchResult]] = set()
    while True:
        while len(pending) < 2 * jobs and not over():
            chunk = next(chunks, None)
            if chunk is None:
                break
            pending.add(pool.submit(run, *chunk))
        if not pending:
            return
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        for future in done:
            total.merge(future.result())
