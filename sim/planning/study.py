"""What a study asks: workload, SLO, objective, search space, prices. Plain frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sim.cluster.prefill_decode import KvLink

METRICS = ("ttft", "tpot", "itl", "e2el")
OBJECTIVES = ("max_goodput_per_gpu", "min_cost", "max_rate")
METHODS = ("grid", "tpe")
ARRIVALS = ("trace", "poisson", "gamma", "constant")
ON_OVERSIZE = ("miss", "leave_out")
# Two-sided quantiles of Student's t need no library for these.
CONFIDENCES = (0.9, 0.95, 0.99)
AUTO = "auto"
# Of each kind, so that the seeds of one kind are not those of another.
MOST_SEEDS = 100

AxisValue = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """A trace or a generator; the rate is the study's to vary.

    `block_requests` is the length of the consecutive stretches of a trace that are drawn, one
    from each of as many equal parts of it, to make runs of any length. `generator` takes
    `parameters` of its own.
    """

    trace: Path | None = None
    generator: str | None = None
    arrivals: str = "trace"
    burstiness: float = 1.0
    block_requests: int = 250
    num_requests: int | None = None
    window_start_s: int = 0
    window_length_s: int | None = None
    parameters: Mapping[str, AxisValue] = field(default_factory=dict)
    on_oversize: str = "miss"


@dataclass(frozen=True, slots=True)
class Limit:
    """An upper limit for a percentile of a latency; percentile None is the mean."""

    metric: str
    percentile: float | None
    limit_ms: float

    @property
    def name(self) -> str:
        """Short name, as `p99 ttft`."""
        which = "mean" if self.percentile is None else f"p{self.percentile:g}"
        return f"{which} {self.metric}"


@dataclass(frozen=True, slots=True)
class ShareGoal:
    """At least `share` of the requests keep all of `limits_ms`."""

    share: float
    limits_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Slo:
    """Everything that must hold at once."""

    limits: tuple[Limit, ...] = ()
    goal: ShareGoal | None = None

    def request_limits_ms(self) -> dict[str, float]:
        """What a single request must keep to count as good."""
        limits = dict(self.goal.limits_ms) if self.goal else {}
        for limit in self.limits:
            if limit.metric != "itl":
                limits[limit.metric] = min(limit.limit_ms, limits.get(limit.metric, limit.limit_ms))
        return limits

    def least_share(self) -> float | None:
        """The largest share of good requests that any limit asks for, if one does."""
        shares = [limit.percentile / 100 for limit in self.limits if limit.percentile is not None]
        shares += [self.goal.share] if self.goal is not None else []
        return max(shares, default=None)

    def describe(self) -> str:
        """One line for people."""
        parts = [f"{limit.name} <= {limit.limit_ms:g} ms" for limit in self.limits]
        if self.goal is not None:
            each = ", ".join(f"{name} <= {ms:g} ms" for name, ms in self.goal.limits_ms.items())
            parts.append(f"{self.goal.share:.4g} of requests with {each}")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class Objective:
    """What is best; `rate` is needed by `min_cost`."""

    kind: str = "max_goodput_per_gpu"
    rate: float | None = None
    max_gpus: int | None = None


@dataclass(frozen=True, slots=True)
class SearchSpec:
    """How hard to search.

    `requests` counts those of one run, for each server that takes new requests. Runs leave the
    first `warmup` and the last `cooldown` share of them out of the SLO. `keep` configurations
    are refined with all seeds after a first look with one. A confirmation run has
    `verify_factor` times as many requests, and a seed that the search has not seen.

    A run lasts for `multiple` times its slowest process, for which it is given up to `longest`
    times as many requests. Up to `max_seeds` seeds are run until half of the interval is at most
    `width` of the capacity.
    """

    method: str = "grid"
    trials: int = 20
    seed: int = 0
    seeds: int = 4
    max_seeds: int = 16
    width: float = 0.1
    requests: int = 2000
    warmup: float = 0.1
    cooldown: float = 0.1
    tolerance: float = 0.02
    confidence: float = 0.95
    keep: int = 3
    verify_seeds: int = 2
    verify_factor: float = 4.0
    multiple: float = 10.0
    longest: float = 16.0


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Equal servers within a fleet, as changes to the configuration's other axes."""

    count: int
    role: str
    changes: Mapping[str, AxisValue]


@dataclass(frozen=True, slots=True)
class Study:
    """A validated study."""

    name: str
    path: Path
    workload: WorkloadSpec
    slo: Slo
    objective: Objective
    axes: Mapping[str, tuple[AxisValue, ...]]
    fleets: Mapping[str, tuple[GroupSpec, ...]]
    prices: Mapping[str, float]
    link: KvLink
    search: SearchSpec
