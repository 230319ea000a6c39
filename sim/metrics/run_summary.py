"""The result of a run as a type: what `summary.json` holds, complete when it is made.

Names and order of the JSON keys are a public format; `SCHEMA` counts its versions. The top level
is that of `vllm bench serve`, everything else stands under `sim`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from sim.cost.trust import Trust

# Counts up when a key changes its name or meaning; new keys do not count.
SCHEMA = 1
PERCENTILES = (50, 90, 95, 99)
Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Latency:
    """Mean, median, population standard deviation and linear percentiles in ms.

    None is what does not exist: nothing was measured, or the tail of a queue that grows.
    """

    mean: float | None = None
    median: float | None = None
    std: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None

    def without_tails(self) -> Latency:
        """The same with no percentile above the median."""
        return replace(self, p90=None, p95=None, p99=None)

    def to_json(self, name: str) -> Json:
        """Keys as `mean_ttft_ms` for the name `ttft`."""
        return {f"{one.name}_{name}_ms": getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Requests by how they ended."""

    pending: int
    completed: int
    rejected: int
    unsent: int

    @property
    def total(self) -> int:
        """All requests of the workload."""
        return self.pending + self.completed + self.rejected + self.unsent


@dataclass(frozen=True, slots=True)
class PriorityClass:
    """The completed requests of one priority."""

    priority: int
    completed: int
    ttft: Latency
    e2el: Latency

    def to_json(self) -> Json:
        """Latencies under their usual keys."""
        return {
            "priority": self.priority,
            "completed": self.completed,
            **self.ttft.to_json("ttft"),
            **self.e2el.to_json("e2el"),
        }


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Prefix cache: tokens that admissions found, all of them and the first of each request."""

    prefix_hit_tokens: int
    prefix_queried_tokens: int
    prefix_hit_rate: float
    first_admission_hit_tokens: int
    first_admission_queried_tokens: int
    first_admission_hit_rate: float
    # Of a run with a host tier: what admissions found there, part of `prefix_hit_tokens`.
    host_hit_tokens: int | None = None
    host_hit_rate: float | None = None

    def to_json(self) -> Json:
        """Figures of a tier only where there is one."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """KV pool, requests and batches over time; `batch_size_steps` counts steps by batch size."""

    mean_kv_utilisation: float
    peak_kv_utilisation: float
    mean_requests_in_system: float
    mean_requests_waiting: float
    mean_requests_running: float
    num_steps: int
    batch_size_steps: Mapping[int, int]

    def to_json(self) -> Json:
        """Batch sizes are text, as JSON's keys must be."""
        batches = {str(batch): steps for batch, steps in self.batch_size_steps.items()}
        return {**asdict(self), "batch_size_steps": batches}


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Model FLOPs and bytes over busy time and the data sheet's dense peak, per rank."""

    peak_flops_per_s: float
    peak_memory_bytes_per_s: float
    mfu: float
    mbu: float
    decode_mfu: float
    decode_mbu: float
    prefill_mfu: float
    prefill_mbu: float


@dataclass(frozen=True, slots=True)
class PhysicalFloor:
    """Steps that were simulated faster than the data sheet allows."""

    checked: bool
    violations: int
    worst_ratio: float
    worst_step: str


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """What one replica did."""

    completed: int
    num_steps: int
    busy_s: float
    utilisation: float
    mean_kv_utilisation: float
    peak_kv_utilisation: float
    computed_tokens: int
    decode_steps: int


@dataclass(frozen=True, slots=True)
class Provenance:
    """Everything that decides the figures; no clock, path or host name."""

    cost: Mapping[str, object]
    deployment: Mapping[str, object]
    kernel: Mapping[str, object]
    model: Mapping[str, object]
    hardware: Mapping[str, object]
    workload: Mapping[str, object]
    options: Mapping[str, object]
    seed: int
    versions: Mapping[str, str]

    def to_json(self) -> Json:
        """The fields in their order."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True, slots=True)
class RunIntervals:
    """Bounds of the figures over replicates of the run; None where a replicate lacked one."""

    replicates: int
    level: float
    resampled: tuple[str, ...]
    unstable_replicates: int
    bounds: Mapping[str, tuple[float, float] | None]


@dataclass(frozen=True, slots=True)
class CostTrust:
    """How far off the kind of cost model was measured to be, and why `auto` took no better one."""

    kind: str
    measured: Trust
    passed_over: Mapping[str, str]

    @property
    def error_class(self) -> str:
        """The measured error in one line."""
        return self.measured.text

    def to_json(self) -> Json:
        """Kind, error class in words and numbers, and what was passed over."""
        return {
            "kind": self.kind,
            "error_class": self.error_class,
            **self.measured.to_json(),
            "passed_over": dict(self.passed_over),
        }


@dataclass(frozen=True, slots=True)
class SimFigures:
    """What `vllm bench serve` does not know."""

    queue: Latency
    requests: RequestCounts
    rejections: Mapping[str, int]
    num_preemptions: int
    num_preempted_requests: int
    cache: CacheUse
    load: LoadFigures
    efficiency: Efficiency
    slo_ms: Mapping[str, float]
    physical_floor: PhysicalFloor
    replicas: tuple[ReplicaFigures, ...]
    num_extrapolated_steps: int
    stable: bool
    provenance: Provenance
    intervals: RunIntervals | None = None
    trust: CostTrust | None = None
    # Of a workload with priorities, the most important first.
    priorities: tuple[PriorityClass, ...] = ()

    def to_json(self) -> Json:
        """The `sim` part of summary.json."""
        document: Json = {
            **self.queue.to_json("queue"),
            "requests": asdict(self.requests),
            "rejections": dict(self.rejections),
            "num_preemptions": self.num_preemptions,
            "num_preempted_requests": self.num_preempted_requests,
            **self.cache.to_json(),
            **self.load.to_json(),
            **asdict(self.efficiency),
            "slo_ms": dict(self.slo_ms),
            "physical_floor": asdict(self.physical_floor),
            "replicas": [asdict(replica) for replica in self.replicas],
            "num_extrapolated_steps": self.num_extrapolated_steps,
            "stable": self.stable,
            "provenance": self.provenance.to_json(),
        }
        if self.intervals is not None:
            document["intervals"] = asdict(self.intervals)
        if self.trust is not None:
            document["trust"] = self.trust.to_json()
        if self.priorities:
            document["priorities"] = [one.to_json() for one in self.priorities]
        return document


@dataclass(frozen=True, slots=True)
class RunSummary:
    """All figures of a run. Rates are per second, latencies in ms, `duration` in seconds.

    `request_goodput` is None where the run had no SLO. Tails of TTFT and E2EL are None if the run
    was not stable: they depend on its length.
    """

    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    request_goodput: float | None
    ttft: Latency
    tpot: Latency
    e2el: Latency
    itl: Latency
    sim: SimFigures
    schema: int = SCHEMA

    def to_json(self) -> Json:
        """The content of summary.json, keys in their order."""
        document: Json = {"schema": self.schema}
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, Latency):
                document.update(value.to_json(one.name))
            elif isinstance(value, SimFigures):
                document["sim"] = value.to_json()
            elif value is not None:
                document.setdefault(one.name, value)
        return document
