"""Makes a run's summary from its ledger and counters, defined as `vllm bench serve` does.

All sums are exact integers or `math.fsum`, so that equal runs give equal bytes. Nothing here
depends on the host's clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.core import ConfigError
from sim.metrics.percentiles import gap_percentiles, percentiles
from sim.metrics.requests import COMPLETED, STATUS_NAMES, Ledger
from sim.metrics.result import RunResult
from sim.metrics.run_summary import (
    PERCENTILES,
    CacheUse,
    CostTrust,
    Efficiency,
    Latency,
    LoadFigures,
    PhysicalFloor,
    PriorityClass,
    Provenance,
    ReplicaFigures,
    RequestCounts,
    RunIntervals,
    RunSummary,
    SimFigures,
)
from sim.metrics.server_stats import ServerStats, Stage
from sim.metrics.stability import is_closed_loop, is_stable
from sim.metrics.token_gaps import GapPool
from sim.specs.hardware import Hardware

SLO_METRICS = ("ttft", "tpot", "e2el")
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Latencies of one completed request, in ns."""

    row: int
    queue_ns: int
    preempted_ns: int
    ttft_ns: int
    e2e_ns: int
    output_tokens: int

    @property
    def tpot_ns(self) -> float | None:
        """Mean gap after the first token; None with a single token."""
        if self.output_tokens <= 1:
            return None
        return (self.e2e_ns - self.ttft_ns) / (self.output_tokens - 1)


def request_times(ledger: Ledger) -> list[RequestTimes]:
    """Latencies of all completed requests, by row; every one counts from the arrival."""
    times = []
    for row, status in enumerate(ledger.status):
        if status != COMPLETED:
            continue
        arrival = ledger.arrival_ns[row]
        times.append(
            RequestTimes(
                row,
                ledger.first_scheduled_ns[row] - arrival,
                ledger.preempted_ns[row],
                ledger.first_token_ns[row] - arrival,
                ledger.finish_ns[row] - arrival,
                ledger.output_tokens[row],
            )
        )
    return times


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """SLOs in ms from `ttft:500 tpot:50 e2el:...`.

    Raises:
        ConfigError: an unknown metric, a repeated one, or a limit that is not positive.
    """
    slos: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            limit_ms = float(value)
        except ValueError:
            limit_ms = math.nan
        if name not in SLO_METRICS or name in slos or not 0 < limit_ms < math.inf:
            names = ", ".join(SLO_METRICS)
            raise ConfigError("goodput", pair, f"must be METRIC:MS once each, METRIC of {names}")
        slos[name] = limit_ms
    return slos


def meets(times: RequestTimes, slos_ms: Mapping[str, float]) -> bool:
    """True if a request keeps every SLO; a single-token request has a TPOT of 0."""
    values = {
        "ttft": times.ttft_ns / NS_PER_MS,
        "tpot": (times.tpot_ns or 0.0) / NS_PER_MS,
        "e2el": times.e2e_ns / NS_PER_MS,
    }
    return all(values[name] <= limit for name, limit in slos_ms.items())


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the figures need beside the raw result."""

    hardware: Hardware
    tp: int
    slos_ms: Mapping[str, float]
    num_extrapolated_steps: int
    provenance: Provenance
    intervals: RunIntervals | None = None
    trust: CostTrust | None = None


def summarize(result: RunResult, facts: RunFacts) -> RunSummary:
    """All figures of a run."""
    ledger, servers = result.ledger, result.servers
    times = request_times(ledger)
    duration_s = result.end_ns / NS_PER_S
    workload = result.workload
    num_inputs = sum([workload.prompt_tokens[request.row] for request in times])
    num_outputs = sum([request.output_tokens for request in times])
    ttft = _latency([request.ttft_ns / NS_PER_MS for request in times])
    e2el = _latency([request.e2e_ns / NS_PER_MS for request in times])
    sim = _sim_figures(result, times, facts)
    if not sim.stable:
        # Tails of a queue that grows depend on the length of the run, so they are no result.
        ttft, e2el = ttft.without_tails(), e2el.without_tails()
    pool = GapPool()
    for server in servers:
        pool.merge(server.gaps)
    return RunSummary(
        duration=duration_s,
        completed=len(times),
        failed=len(ledger) - len(times),
        total_input_tokens=num_inputs,
        total_output_tokens=num_outputs,
        request_throughput=len(times) / duration_s,
        output_throughput=num_outputs / duration_s,
        total_token_throughput=(num_inputs + num_outputs) / duration_s,
        max_output_tokens_per_s=_peak_tokens_per_second(servers),
        max_concurrent_requests=ledger.in_system.peak,
        request_goodput=_goodput(times, facts.slos_ms, duration_s),
        ttft=ttft,
        tpot=_latency([t / NS_PER_MS for one in times if (t := one.tpot_ns) is not None]),
        e2el=e2el,
        itl=pooled_latency(pool),
        sim=sim,
    )


def _goodput(
    times: Sequence[RequestTimes], slos_ms: Mapping[str, float], duration_s: float
) -> float | None:
    if not slos_ms:
        return None
    return sum([meets(request, slos_ms) for request in times]) / duration_s


def _sim_figures(result: RunResult, times: Sequence[RequestTimes], facts: RunFacts) -> SimFigures:
    ledger, servers = result.ledger, result.servers
    stable = is_stable(ledger, is_closed_loop(result.workload))
    queue = _latency([request.queue_ns / NS_PER_MS for request in times])
    counts = [sum(1 for status in ledger.status if status == code) for code in range(4)]
    return SimFigures(
        queue=queue if stable else queue.without_tails(),
        requests=RequestCounts(**dict(zip(STATUS_NAMES, counts, strict=True))),
        rejections=dict(sorted(ledger.rejections.items())),
        num_preemptions=sum(ledger.preemptions),
        num_preempted_requests=sum(1 for count in ledger.preemptions if count),
        cache=_cache(servers, "host_blocks" in facts.provenance.kernel),
        load=_load(result),
        efficiency=_efficiency(servers, facts.hardware, facts.tp),
        slo_ms=dict(facts.slos_ms),
        physical_floor=_floor(servers),
        replicas=tuple(
            _replica(server, result.end_ns, ledger, index) for index, server in enumerate(servers)
        ),
        num_extrapolated_steps=facts.num_extrapolated_steps,
        stable=stable,
        provenance=facts.provenance,
        intervals=facts.intervals,
        trust=facts.trust,
        priorities=_priority_classes(result, times, stable),
    )


def _priority_classes(
    result: RunResult, times: Sequence[RequestTimes], stable: bool
) -> tuple[PriorityClass, ...]:
    """Latencies by priority, for a workload that has priorities."""
    workload = result.workload
    if workload.priorities is None:
        return ()
    classes: dict[int, list[RequestTimes]] = {}
    for request in times:
        classes.setdefault(workload.priority(request.row), []).append(request)
    found = []
    for priority in sorted(classes):
        members = classes[priority]
        ttft = _latency([request.ttft_ns / NS_PER_MS for request in members])
        e2el = _latency([request.e2e_ns / NS_PER_MS for request in members])
        if not stable:
            ttft, e2el = ttft.without_tails(), e2el.without_tails()
        found.append(PriorityClass(priority, len(members), ttft, e2el))
    return tuple(found)


def _latency(values: Sequence[float]) -> Latency:
    """Statistics of values in ms."""
    if not values:
        return Latency()
    mean = math.fsum(values) / len(values)
    variance = math.fsum([(value - mean) ** 2 for value in values]) / len(values)
    cuts = percentiles(values, PERCENTILES)
    return Latency(mean, cuts[0], math.sqrt(variance), *cuts)


def pooled_latency(pool: GapPool) -> Latency:
    """The same as `_latency` for gaps that are pooled with counts."""
    values, counts = pool.distinct()
    if not len(values):
        return Latency()
    total = int(counts.sum())
    whole = sum(int(v) * int(c) for v, c in zip(values.tolist(), counts.tolist(), strict=True))
    mean_ns = whole / total
    squares = ((values - mean_ns) ** 2 * counts).tolist()
    cuts = [cut / NS_PER_MS for cut in gap_percentiles(pool, PERCENTILES)]
    std = math.sqrt(math.fsum(squares) / total) / NS_PER_MS
    return Latency(mean_ns / NS_PER_MS, cuts[0], std, *cuts)


def _peak_tokens_per_second(servers: Sequence[ServerStats]) -> float:
    longest = max(len(server.tokens_per_second) for server in servers)
    totals = [0] * longest
    for server in servers:
        for second, tokens in enumerate(server.tokens_per_second):
            totals[second] += tokens
    return float(max(totals))


def _cache(servers: Sequence[ServerStats], has_tier: bool) -> CacheUse:
    hits = sum(server.hit_tokens for server in servers)
    queried = sum(server.queried_tokens for server in servers)
    first_hits = sum(server.first_hit_tokens for server in servers)
    first_queried = sum(server.first_queried_tokens for server in servers)
    host_hits = sum(server.host_hit_tokens for server in servers) if has_tier else None
    return CacheUse(
        hits,
        queried,
        _ratio(hits, queried),
        first_hits,
        first_queried,
        _ratio(first_hits, first_queried),
        host_hits,
        None if host_hits is None else _ratio(host_hits, queried),
    )


def _load(result: RunResult) -> LoadFigures:
    servers, end_ns, ledger = result.servers, result.end_ns, result.ledger
    capacity_ns = sum(server.num_blocks for server in servers) * end_ns
    batches: dict[int, int] = {}
    for server in servers:
        for batch, steps in server.batch_steps.items():
            batches[batch] = batches.get(batch, 0) + steps
    return LoadFigures(
        mean_kv_utilisation=_ratio(sum(server.kv_block_ns for server in servers), capacity_ns),
        peak_kv_utilisation=max(s.kv_peak_blocks / s.num_blocks for s in servers),
        mean_requests_in_system=ledger.in_system.area_ns / end_ns,
        mean_requests_waiting=ledger.in_queue.area_ns / end_ns,
        mean_requests_running=sum(server.running_ns for server in servers) / end_ns,
        num_steps=sum(server.num_steps for server in servers),
        batch_size_steps={batch: batches[batch] for batch in sorted(batches)},
    )


def _efficiency(servers: Sequence[ServerStats], hardware: Hardware, tp: int) -> Efficiency:
    decode, prefill, total = Stage(), Stage(), Stage()
    for server in servers:
        decode.merge(server.decode)
        prefill.merge(server.prefill)
    total.merge(decode)
    total.merge(prefill)
    shares = []
    for stage in (total, decode, prefill):
        busy_s = stage.busy_ns / NS_PER_S
        shares.append(_ratio(stage.flops, hardware.flops_per_s * busy_s))
        shares.append(_ratio(stage.num_bytes, hardware.memory_bytes_per_s * busy_s))
    return Efficiency(hardware.flops_per_s * tp, hardware.memory_bytes_per_s * tp, *shares)


def _floor(servers: Sequence[ServerStats]) -> PhysicalFloor:
    worst = min((server.floor for server in servers), key=lambda floor: floor.worst_ratio)
    return PhysicalFloor(
        checked=all(server.check_floor for server in servers),
        violations=sum(server.floor.count for server in servers),
        worst_ratio=worst.worst_ratio,
        worst_step=worst.worst,
    )


def _replica(server: ServerStats, end_ns: int, ledger: Ledger, index: int) -> ReplicaFigures:
    completed = sum(
        1
        for replica, status in zip(ledger.replica, ledger.status, strict=True)
        if replica == index and status == COMPLETED
    )
    return ReplicaFigures(
        completed=completed,
        num_steps=server.num_steps,
        busy_s=server.busy_ns / NS_PER_S,
        utilisation=_ratio(server.busy_ns, end_ns),
        mean_kv_utilisation=_ratio(server.kv_block_ns, server.num_blocks * end_ns),
        peak_kv_utilisation=server.kv_peak_blocks / server.num_blocks,
        computed_tokens=server.decode.num_tokens + server.prefill.num_tokens,
        decode_steps=server.decode.num_steps,
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
