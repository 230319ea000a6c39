"""Which cost model `--cost auto` takes: candidates in order, each with why it may not do.

A new kind of cost model enters `CANDIDATES`; `auto` takes the first that nothing speaks against.
How far off each is stands with the cost models themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sim.cost.operator_tables import why_no_tables
from sim.cost.profiles import find_profile
from sim.specs.hardware import Hardware
from sim.specs.models import ModelShape


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be simulated, as far as a cost model depends on it."""

    model: ModelShape
    hardware: Hardware
    tp: int
    expert_parallel: bool
    async_scheduling: bool
    engine: str | None = None  # what the engine of a profile begins with


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kind of cost model; `why_not` says in a few words why it does not do, or None."""

    kind: str
    why_not: Callable[[Asked], str | None]


def _why_not_calibrated(asked: Asked) -> str | None:
    if asked.expert_parallel:
        return "profiles know no experts"
    overlapped = asked.async_scheduling
    found = find_profile(asked.model, asked.hardware, asked.tp, overlapped, asked.engine)
    if found is None:
        how = "asynchronous" if overlapped else "synchronous"
        engine = f" of {asked.engine}" if asked.engine else ""
        return (
            f"no profile{engine} with {how} scheduling of {asked.model.name} on"
            f" {asked.hardware.name} at tp={asked.tp}"
        )
    return None


def _why_not_optable(asked: Asked) -> str | None:
    if asked.expert_parallel:
        return "operator tables know no shared experts"
    if asked.engine is None or not asked.engine.startswith("vllm"):
        return "operator tables are of vLLM, which --engine does not name"
    return why_no_tables(asked.model, asked.hardware, asked.tp)


def _why_not_roofline(asked: Asked) -> str | None:
    return None  # the data sheet is always there


CANDIDATES: tuple[Candidate, ...] = (
    Candidate("calibrated", _why_not_calibrated),
    Candidate("optable", _why_not_optable),
    Candidate("roofline", _why_not_roofline),
)


def choose(
    asked: Asked,
    found_wanting: Iterable[tuple[str, str]] = (),
    candidates: Sequence[Candidate] = CANDIDATES,
) -> tuple[str, Mapping[str, str]]:
    """The first candidate that nothing speaks against, and what speaks against those before it.

    `found_wanting` are kinds that a run has shown not to do, with the reason.
    """
    passed_over: dict[str, str] = {}
    shown = dict(found_wanting)
    for candidate in candidates:
        reason = shown.get(candidate.kind) or candidate.why_not(asked)
        if reason is None:
            return candidate.kind, passed_over
        passed_over[candidate.kind] = reason
    raise AssertionError("the last candidate takes everything")
