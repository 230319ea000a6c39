"""The HTML report of a run: one file with a table and plots."""

from __future__ import annotations

import json
from html import escape

from sim.metrics.result import RunResult
from sim.metrics.run_summary import RunSummary
from sim.report.headline import (
    REPLICA_COLUMNS,
    answer_rows,
    cost_text,
    lead_of,
    replica_rows,
    run_rows,
    trust_rows,
)
from sim.report.page import figures, page
from sim.report.run_charts import run_charts
from sim.report.tables import html_table, number

LATENCIES = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2E", "e2el"))
LATENCY_COLUMNS = ("mean", "p50", "p90", "p95", "p99")


def latency_rows(summary: RunSummary) -> list[list[str]]:
    """Latencies in ms: one row per metric, columns as in `LATENCY_COLUMNS`."""
    rows = [
        [label, *(_latency_cell(summary, column, key) for column in LATENCY_COLUMNS)]
        for label, key in LATENCIES
    ]
    for one in summary.sim.priorities:
        cells = [getattr(one.ttft, column) for column in LATENCY_COLUMNS]
        shown = ["unstable" if cell is None else number(cell) for cell in cells]
        rows.append([f"TTFT, priority {one.priority}", *shown])
    return rows


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
        *trust_rows(sim.trust),
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
        *([] if cache.host_hit_rate is None else
          [["of these from the host tier, all", number(cache.host_hit_rate)]]),
        ["preemptions", number(sim.num_preemptions)],
        ["MFU / MBU of busy time", _pair(efficiency.mfu, efficiency.mbu)],
    ]  # fmt: skip
    return rows


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


def render_report(result: RunResult, summary: RunSummary, command: str = "") -> str:
    """The whole page; `command` is the one that repeats the run."""
    warnings = "".join(f'<p class="warn">{escape(text)}</p>' for text in warnings_of(summary))
    sections = {
        "Answer": html_table([], answer_rows(summary), kind="facts"),
        "What was run": html_table([], run_rows(summary), kind="text") + _command(command),
        "Latency, ms": html_table(["", *LATENCY_COLUMNS], latency_rows(summary)),
        "Throughput and memory": html_table([], fact_rows(summary), kind="facts"),
        "Replicas": html_table(REPLICA_COLUMNS, replica_rows(summary)),
        "Plots": figures(run_charts(result, summary)),
        "How this run was made": _provenance(summary),
    }
    return page(result.workload.name, lead_of(summary), sections, warnings)


def _command(command: str) -> str:
    return f"<p>Repeat it with</p><pre>{escape(command)}</pre>" if command else ""


def _provenance(summary: RunSummary) -> str:
    text = json.dumps(summary.sim.provenance.to_json(), indent=1)
    shown = "<summary>All that decides the figures</summary>"
    return f"<details>{shown}<pre>{escape(text)}</pre></details>"


def _pair(first: float, second: float) -> str:
    return f"{first:.1%} / {second:.1%}"
