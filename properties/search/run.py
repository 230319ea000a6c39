"""Runs one workload under all checks and names what broke."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from engine.core.audit import audit
from engine.core.config import KernelConfig
from engine.core.errors import KernelBug
from engine.core.scheduler import Scheduler
from properties.follower import (
    SUSPENDED_IF_PERTURBED,
    SUSPENDED_IF_PREFILL_FIRST,
    SUSPENDED_IF_PRIORITY,
    Follower,
)
from properties.follower.view import Inconclusive, LawBroken, Target
from properties.reference import ReferenceScheduler
from properties.search.driver import Driver
from properties.search.workloads import Workload

Factory = Callable[[KernelConfig], Target]


def kernel(config: KernelConfig) -> Target:
    """The kernel itself, as a target."""
    return cast(Target, Scheduler(config))


def make_driver(
    config: KernelConfig,
    vocabulary: int,
    factory: Factory = kernel,
    *,
    only: frozenset[str] | None = None,
    thorough: bool = True,
    perturbed: bool = False,
    suspended: frozenset[str] = frozenset(),
    foreign: bool = False,
) -> Driver:
    """A driver with its follower; `thorough` adds the state audit and the naive reference.

    `foreign` judges a scheduler that is not ours also by what our policies leave out by design.
    """
    has_twin = thorough and not (suspended or perturbed) and only is None
    if config.policy == "priority":
        suspended |= SUSPENDED_IF_PRIORITY
        if config.async_scheduling:
            # A withdrawn entry may have keyed the block of a step in flight, which no plan tells.
            suspended |= {"K1", "K10", "T1", "T2", "T5"}
    if config.policy != "prefill_first" and config.prefill_schedule_interval > 1:
        suspended |= {"T2", "T3"}  # when prompts are held back is left to the naive reference
    if perturbed:
        suspended |= SUSPENDED_IF_PERTURBED
    if config.policy == "prefill_first" and not foreign:
        suspended |= SUSPENDED_IF_PREFILL_FIRST
    follower = Follower(config, vocabulary, only, suspended)
    with translated(follower):
        target = factory(config)
    twin = ReferenceScheduler(config) if has_twin else None
    checker = _auditor(follower) if thorough and isinstance(target, Scheduler) else None
    return Driver(target, follower, twin, checker)


def run_workload(
    workload: Workload,
    factory: Factory = kernel,
    *,
    only: frozenset[str] | None = None,
    thorough: bool = True,
    perturbed: bool = False,
    suspended: frozenset[str] = frozenset(),
    foreign: bool = False,
) -> Follower:
    """Runs a workload to its end.

    Raises:
        LawBroken: the first broken law; a crash counts as law `CRASH`.
        Inconclusive: with `only`, when another law's alarm or a crash ends the run, or requests
            are left when it has drained. Whoever looks for a certain law goes on; for everybody
            else it is a failure.
    """
    driver = make_driver(
        workload.config,
        workload.vocabulary,
        factory,
        only=only,
        thorough=thorough,
        perturbed=perturbed,
        suspended=suspended,
        foreign=foreign,
    )
    with translated(driver.follower):
        for operation in workload.operations:
            driver.apply(operation)
        if only is not None and workload.operations[-1:] == (["drain"],):
            _require_all_ended(driver)
    return driver.follower


def _require_all_ended(driver: Driver) -> None:
    live = list(driver.follower.live)
    if live or driver.target.has_work:
        raise Inconclusive("L3", f"step {driver.follower.ledger.steps}: {live} never ended")


@contextmanager
def translated(follower: Follower) -> Iterator[None]:
    """Turns alarms of the kernel and crashes into broken laws.

    With the follower's `only`, an alarm of another law or a crash makes the run `Inconclusive`.
    """
    try:
        yield
    except LawBroken:
        raise
    except Exception as crash:
        law = crash.law if isinstance(crash, KernelBug) else _law_of(crash)
        asked = follower.only is None or law in follower.only
        where = traceback.extract_tb(crash.__traceback__)[-1]
        detail = f"{type(crash).__name__}: {crash} in {where.name}"
        kind = LawBroken if asked else Inconclusive
        raise kind(law, f"step {follower.ledger.steps}: {detail}") from crash


def _law_of(crash: Exception) -> str:
    """The law that a failed assertion of the kernel cites, else `CRASH`."""
    cited = re.match(r"LAW-([A-Z]\d+): ", str(crash)) if isinstance(crash, AssertionError) else None
    return cited.group(1) if cited else "CRASH"


def _auditor(follower: Follower) -> Callable[[Any], None]:
    def check(target: Any) -> None:  # noqa: ANN401
        try:
            audit(target)
        except KernelBug as bug:
            follower.complain(bug.law, bug.detail)

    return check


def first_failure(
    factory: Factory,
    workloads: Callable[[int], Workload],
    seeds: range,
    only: frozenset[str] | None = None,
) -> tuple[int, LawBroken] | None:
    """The first seed of a range whose workload breaks a law, one of `only` if given."""
    for seed in seeds:
        try:
            run_workload(workloads(seed), factory, only=only)
        except Inconclusive:
            continue
        except LawBroken as broken:
            return seed, broken
    return None
