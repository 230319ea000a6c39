"""What a law is, and the check that it names real code and a defect that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

from properties.defects import MUTANTS, Mutant
from properties.follower.view import LawBroken
from properties.search import workloads
from properties.search.run import first_failure
from properties.search.workloads import Workload, random_workload

BOTH = "all policies"
UNPERTURBED = "all policies, unperturbed"
EXACT = "all policies, unperturbed"
FCFS = "`mixed` and `prefill_first`, unperturbed"
PRIORITY = "`priority`"
ASYNC = "all policies, with `async_scheduling`"
SIMULATOR = "the simulator"
# Workloads within which a planted defect must be caught: the default example budget.
BUDGET = 3000


@dataclass(frozen=True, slots=True)
class Law:
    """One law.

    `checks` are `module:name` of the code that judges it. `canary` breaks it on purpose and
    returns the alarm, or None if nobody noticed; kernel laws leave it to the planted defects.
    """

    id: str
    sentence: str
    holds: str
    checks: tuple[str, ...]
    canary: Callable[[], LawBroken | None] | None = None
    canary_text: str = ""

    @property
    def mutants(self) -> tuple[Mutant, ...]:
        """Planted defects that must break this law."""
        return tuple(mutant for mutant in MUTANTS if mutant.law == self.id)

    def broken_by(self) -> str:
        """What breaks it, for the documentation."""
        names = [mutant.name for mutant in self.mutants]
        if self.canary is not None:
            names.append(self.canary_text)
        return ", ".join(names)


def resolve(check: str) -> object:
    """The object that `module:name` or `module:Class.method` names."""
    module, _, path = check.partition(":")
    found: object = import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def caught(mutant: Mutant, only: bool = True) -> tuple[int, LawBroken] | None:
    """The first workload that exposes a planted defect, by its own law only or by any."""
    draw: Callable[[int], Workload] = partial(
        random_workload, policy=mutant.policy, is_async=mutant.is_async
    )
    if mutant.workloads != "random_workload":
        draw = getattr(workloads, mutant.workloads)
    laws = frozenset({mutant.law}) if only else None
    return first_failure(mutant.factory, draw, range(BUDGET), only=laws)  # type: ignore[arg-type]
