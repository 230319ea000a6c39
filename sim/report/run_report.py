"""The HTML report of a run: one file with a table and plots."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from sim.metrics.result import RunResult
from sim.metrics.run_summary import CostTrust, RunSummary
from sim.metrics.summary import NS_PER_MS, NS_PER_S, RequestTimes, request_times
from sim.report.page import figures, page
from sim.report.svg import Series, line_chart
from sim.report.tables import html_table, number

LATENCIES = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2E", "e2el"))
_ARRIVAL_BINS = 200
LATENCY_COLUMNS = ("mean", "p50", "p90", "p95", "p99")


def latency_rows(summary: RunSummary) -> list[list[str]]:
    """Latencies in ms: one row per metric, columns as in `LATENCY_COLUMNS`."""
    return [
        [label, *(_latency_cell(summary, column, key) for column in LATENCY_COLUMNS)]
        for label, key in LATENCIES
    ]


def _latency_cell(summary: RunSummary, column: str, key: str) -> str:
    value = getattr(getattr(summary, key), column)
    if value is None and not summary.sim.stable:
        return "unstable"
    intervals = summary.sim.intervals
    interval = None if intervals is None else intervals.bounds.get(f"{column}_{key}_ms")
    if interval is None:
        return number(value)
    low, high = interval
    return f"{number(value)} [{number(low, 3)} - {number(high, 3)}]"


def fact_rows(summary: RunSummary) -> list[list[str]]:
    """The other headline figures with their units."""
    sim = summary.sim
    rows = [
        ["cost model", cost_text(sim.provenance.cost)],
        *_trust_rows(sim.trust),
        ["requests completed", f"{number(summary.completed)} of {number(sim.requests.total)}"],
        ["simulated time", f"{number(summary.duration)} s"],
        ["request throughput", f"{number(summary.request_throughput)} req/s"],
        ["output throughput", f"{number(summary.output_throughput)} tok/s"],
        ["total throughput", f"{number(summary.total_token_throughput)} tok/s"],
    ]
    if summary.request_goodput is not None:
        slos = " ".join(f"{name}:{limit:g}" for name, limit in sim.slo_ms.items())
        rows.append([f"goodput ({slos} ms)", f"{number(summary.request_goodput)} req/s"])
    if sim.intervals is not None:
        made = f"{sim.intervals.replicates} replicates: {', '.join(sim.intervals.resampled)}"
        rows.append([f"[ ] {sim.intervals.level:.0%} intervals", made])
    load, cache, efficiency = sim.load, sim.cache, sim.efficiency
    rows += [
        ["KV utilisation, mean / peak", _pair(load.mean_kv_utilisation, load.peak_kv_utilisation)],
        ["prefix hit rate, all / first admission",
         _pair(cache.prefix_hit_rate, cache.first_admission_hit_rate)],
        ["preemptions", number(sim.num_preemptions)],
        ["MFU / MBU of busy time", _pair(efficiency.mfu, efficiency.mbu)],
    ]  # fmt: skip
    return rows


def _trust_rows(trust: CostTrust | None) -> list[list[str]]:
    """How far off the cost model was measured to be, and why `auto` took no better one."""
    if trust is None:
        return []
    rows = [["its error on other runs", trust.error_class]]
    return rows + [[f"not {kind}", why] for kind, why in trust.passed_over.items()]


def cost_text(cost: Mapping[str, Any]) -> str:
    """Which cost model a run used, and what a calibrated one was made from."""
    if cost["name"] != "calibrated":
        return str(cost["name"])
    return f"calibrated on {len(cost['sources'])} logs of {cost['engine']}, {cost['hardware']}"


def warnings_of(summary: RunSummary) -> list[str]:
    """What a reader must know before trusting the figures."""
    sim = summary.sim
    warnings = []
    if not sim.stable:
        warnings.append(
            "unstable at this rate: more work came than can be served, so latencies grow with the"
            " length of the run and their tails are left out"
        )
    for reason, count in sim.rejections.items():
        warnings.append(f"{number(count)} requests were left out: {reason}")
    if sim.requests.unsent:
        warnings.append(
            f"{number(sim.requests.unsent)} requests were never sent,"
            " because an earlier one of their session was left out"
        )
    floor = sim.physical_floor
    if floor.violations:
        warnings.append(
            f"{number(floor.violations)} steps are faster than the hardware's data sheet allows;"
            f" worst: {floor.worst_step}"
        )
    if sim.num_extrapolated_steps:
        warnings.append(
            f"{number(sim.num_extrapolated_steps)} steps lie outside the range of the cost model"
        )
    return warnings


def render_report(result: RunResult, summary: RunSummary) -> str:
    """The whole page."""
    warnings = "".join(f'<p class="warn">{escape(text)}</p>' for text in warnings_of(summary))
    sections = {
        "Latency, ms": html_table(["", *LATENCY_COLUMNS], latency_rows(summary)),
        "Throughput and memory": html_table([], fact_rows(summary)),
        "Plots": figures(_charts(result, request_times(result.ledger))),
        "How this run was made": _provenance(summary),
    }
    lead = "A simulated run of the Lockstep scheduler"
    return page(result.workload.name, lead, sections, warnings)


def _provenance(summary: RunSummary) -> str:
    text = json.dumps(summary.sim.provenance.to_json(), indent=1)
    return f"<pre>{escape(text)}</pre>"


def _charts(result: RunResult, times: Sequence[RequestTimes]) -> dict[str, str]:
    first = [
        _cdf("TTFT", [request.ttft_ns / NS_PER_MS for request in times]),
        _cdf("queue", [request.queue_ns / NS_PER_MS for request in times]),
        _cdf("E2E", [request.e2e_ns / NS_PER_MS for request in times]),
    ]
    tpots = [tpot / NS_PER_MS for request in times if (tpot := request.tpot_ns) is not None]
    return {
        "Latency of requests (share of requests at or below)": line_chart(
            first, "ms", "share of requests", log_x=True, y_max=1.0, steps=True
        ),
        "Time per output token": line_chart(
            [_cdf("TPOT", tpots)], "ms", "share of requests", y_max=1.0, steps=True
        ),
        "Running requests": _over_time(result, "running", "requests"),
        "Waiting requests": _over_time(result, "waiting", "requests"),
        "KV blocks in use": _over_time(result, "kv_blocks", "share of the pool", pool_share=True),
        "Output tokens per second": _over_time(result, "output_tokens", "tokens/s"),
        "TTFT by arrival": line_chart(_ttft_by_arrival(result, times), "arrival, s", "ms"),
        "Batch size (share of steps at or below)": line_chart(
            [_batch_cdf(result)], "sequences in a step", "share of steps", y_max=1.0, steps=True
        ),
    }


def _ttft_by_arrival(result: RunResult, times: Sequence[RequestTimes]) -> list[Series]:
    """Worst and mean TTFT of the requests that arrived in each of 200 bins."""
    arrival_ns = result.ledger.arrival_ns
    width_ns = max(1, result.end_ns // _ARRIVAL_BINS)
    bins: dict[int, list[float]] = {}
    for request in times:
        arrived = arrival_ns[request.row] // width_ns
        bins.setdefault(arrived, []).append(request.ttft_ns / NS_PER_MS)
    middles = [(index + 0.5) * width_ns / NS_PER_S for index in sorted(bins)]
    groups = [bins[index] for index in sorted(bins)]
    return [
        Series("worst", middles, [max(group) for group in groups]),
        Series("mean", middles, [sum(group) / len(group) for group in groups]),
    ]


def _cdf(name: str, values: Sequence[float]) -> Series:
    """Share of values at or below each value; shorter times than 10 us count as that."""
    ordered = [max(value, 0.01) for value in sorted(values)]
    return Series(name, ordered, [(index + 1) / len(ordered) for index in range(len(ordered))])


def _batch_cdf(result: RunResult) -> Series:
    counts: dict[int, int] = {}
    for server in result.servers:
        for batch, steps in server.batch_steps.items():
            counts[batch] = counts.get(batch, 0) + steps
    total, seen = sum(counts.values()), 0
    shares = []
    for batch in sorted(counts):
        seen += counts[batch]
        shares.append(seen / total)
    return Series("batch", [float(batch) for batch in sorted(counts)], shares)


def _over_time(result: RunResult, curve: str, unit: str, pool_share: bool = False) -> str:
    series = []
    for index, server in enumerate(result.servers):
        xs, ys = server.timeline.curve(curve, result.end_ns)
        if pool_share:
            ys = [value / server.num_blocks for value in ys]
        series.append(Series(f"replica {index}", xs, ys))
    return line_chart(
        series,
        "time, s",
        unit,
    )


def _pair(first: float, second: float) -> str:
    return f"{first:.1%} / {second:.1%}"
