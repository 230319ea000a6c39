"""Which cost model `--cost auto` takes: candidates in order, each with why it may not do.

A new kind of cost model enters `CANDIDATES`; `auto` takes the first that nothing speaks against.
The measured errors are those of docs/fidelity.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sim.cost.profile import find_profile
from sim.metrics.run_summary import CostTrust
from sim.specs.hardware import Hardware
from sim.specs.models import ModelShape

# How far off each kind of model was measured to be, on runs that it was not fitted to.
ERROR_CLASSES = {
    "calibrated": "throughput within 1 %, mean TPOT within 4 %, mean TTFT within 10 %",
    "roofline": "throughput -8 to +44 %, mean TPOT -33 to +8 %, mean TTFT -88 to +12 %",
    "roofline fitted to requests": "throughput within 3 %, mean TPOT within 4 %",
}
NO_CLAIM = "not measured: it makes no claim about the hardware"


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be simulated, as far as a cost model depends on it."""

    model: ModelShape
    hardware: Hardware
    tp: int
    expert_parallel: bool
    async_scheduling: bool


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kind of cost model; `why_not` says in a few words why it does not do, or None."""

    kind: str
    why_not: Callable[[Asked], str | None]

    @property
    def error_class(self) -> str:
        """How far off the kind was measured to be."""
        return ERROR_CLASSES[self.kind]


def _why_not_calibrated(asked: Asked) -> str | None:
    if asked.expert_parallel:
        return "profiles know no experts"
    if asked.async_scheduling:
        return "profiles are of engines without async_scheduling"
    if find_profile(asked.model, asked.hardware, asked.tp) is None:
        return f"no profile of {asked.model.name} on {asked.hardware.name} at tp={asked.tp}"
    return None


def _why_not_roofline(asked: Asked) -> str | None:
    return None  # the data sheet is always there


CANDIDATES: tuple[Candidate, ...] = (
    Candidate("calibrated", _why_not_calibrated),
    Candidate("roofline", _why_not_roofline),
)


def choose(
    asked: Asked,
    found_wanting: Mapping[str, str] | None = None,
    candidates: Sequence[Candidate] = CANDIDATES,
) -> CostTrust:
    """The first candidate that nothing speaks against.

    `found_wanting` are kinds that a run has shown not to do, with the reason.
    """
    passed_over: dict[str, str] = {}
    for candidate in candidates:
        reason = (found_wanting or {}).get(candidate.kind) or candidate.why_not(asked)
        if reason is None:
            return CostTrust(candidate.kind, candidate.error_class, passed_over)
        passed_over[candidate.kind] = reason
    raise AssertionError("the last candidate takes everything")


def error_class_of(kind: str, argument: str) -> str:
    """The measured error of a cost model that was asked for by name."""
    if kind == "roofline" and argument:
        return ERROR_CLASSES["roofline fitted to requests"]
    return ERROR_CLASSES.get(kind, NO_CLAIM)
