"""What a recomputation may know of a run besides its log, and the arithmetic of figures."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from engine.core.config import KernelConfig
from engine.core.request import RequestId
from properties.follower.view import LawBroken
from sim.cost.physics import Physics
from sim.workloads.table import Workload

Json = dict[str, Any]
# No figure of this run: where it came from, how far its cost model was asked and is to be trusted,
# and what other runs gave.
NO_FIGURES = (
    "schema",
    "sim.provenance",
    "sim.trust",
    "sim.intervals",
    "sim.num_extrapolated_steps",
)


@dataclass(frozen=True)
class Facts:
    """The requests, and what they were served with."""

    workload: Workload
    config: KernelConfig
    physics: Physics
    num_replicas: int = 1
    slos_ms: Mapping[str, float] = field(default_factory=dict)
    max_concurrency: int | None = None
    is_physical: bool = True  # whether the cost model claims to be about the hardware

    @cached_property
    def row_of(self) -> dict[RequestId, int]:
        """Row of the workload by request id."""
        return {self.workload.request_id(row): row for row in range(len(self.workload))}


def ratio(part: float, whole: float) -> float:
    """A share, 0 of nothing."""
    return part / whole if whole else 0.0


def latency(name: str, values_ns: Iterable[float]) -> Json:
    """The seven statistics of a latency in ms; None of nothing."""
    values = [value / 1e6 for value in values_ns]
    keys = ("mean", "median", "std", "p50", "p90", "p95", "p99")
    if not values:
        return {f"{key}_{name}_ms": None for key in keys}
    found = [statistics.fmean(values), statistics.median(values), statistics.pstdev(values)]
    found += [float(np.percentile(values, percent)) for percent in (50, 90, 95, 99)]
    return {f"{key}_{name}_ms": value for key, value in zip(keys, found, strict=True)}


def without_tails(name: str, values_ns: Iterable[float]) -> Json:
    """The same of a run whose queue grows for ever."""
    figures = latency(name, values_ns)
    return {**figures, **{f"{tail}_{name}_ms": None for tail in ("p90", "p95", "p99")}}


def json_of(document: Json) -> Json:
    """The document as a file would give it back."""
    found: Json = json.loads(json.dumps(document))
    return found


def compare(shown: Json, expected: Json) -> None:
    """Raises LawBroken for a figure that differs, is missing, or was not recomputed."""
    ours, theirs = _leaves(expected), _leaves(json_of(shown))
    for path in sorted(theirs.keys() | ours.keys()):
        if path.startswith(NO_FIGURES):
            continue
        if path not in ours:
            raise LawBroken("M11", f"nobody recomputes {path}")
        if path not in theirs:
            raise LawBroken("M11", f"{path} is not shown")
        if not _equal(theirs[path], ours[path]):
            raise LawBroken("M11", f"{path} is {theirs[path]}, from the log {ours[path]}")


def _leaves(value: object, path: str = "") -> dict[str, object]:
    if isinstance(value, dict):
        pairs = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        pairs = [(f"{path}[{place}]", item) for place, item in enumerate(value)]
    else:
        return {path: value}
    found: dict[str, object] = {}
    for name, item in pairs:
        found.update(_leaves(item, name))
    return found


def _equal(one: object, other: object) -> bool:
    """Counts exactly, fractions but for the rounding of sums taken in another order."""
    if isinstance(one, float) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
    return type(one) is type(other) and one == other
