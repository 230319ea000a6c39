"""The validation page and the text table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from sim.cost.work import Floats
from sim.metrics.summary import NS_PER_MS
from sim.report.page import figures, page
from sim.report.svg import Series, line_chart
from sim.report.tables import html_table, number
from sim.validation.compare import OVERLOAD_SHARE, Comparison
from sim.validation.outcome import Outcome
from sim.validation.predicted import has_pauses

HEADER = ("", "recorded", "teacher-forced", "free-running", "error")
NOISY_HEADER = ("median with noise", "error", "90 % interval")


def header(comparison: Comparison) -> list[str]:
    """The columns of `text_rows`."""
    return [*HEADER] if comparison.intervals is None else [*HEADER, *NOISY_HEADER]


def text_rows(comparison: Comparison) -> list[list[str]]:
    """The figures of one run as texts; those with noise where replicates were run."""
    rows = []
    for row in comparison.rows():
        noisy = []
        if "interval_90" in row:
            low, high = row["interval_90"]
            mark = "" if row["covered"] else "  (missed)"
            interval = f"{number(low)} .. {number(high)}{mark}"
            error = f"{row['noisy_median_error_percent']:+.2f} %"
            noisy = [number(row["noisy_median"]), error, interval]
        teacher = f"{number(row['teacher_forced'])} ({row['teacher_forced_error_percent']:+.2f} %)"
        rows.append(
            [
                row["metric"],
                number(row["recorded"]),
                teacher,
                number(row["free_running"]),
                f"{row['free_running_error_percent']:+.2f} %",
                *noisy,
            ]
        )
    return rows


def notes(comparison: Comparison) -> list[str]:
    """What a reader must know about a run before its figures."""
    run, free = comparison.run, comparison.free
    sources = ", ".join(str(source["name"]) for source in comparison.profile.sources)
    kind = "held out: fitted to" if comparison.held_out else "profile made from"
    lines = [
        f"{kind} {sources}",
        f"decisions: {comparison.different_decisions} of {run.outcome.num_steps:,} steps differ"
        f" under the recorded times; free-running took {free.num_steps:,} steps",
    ]
    for name, error in comparison.steps.errors.items():
        if name in ("decode", "mixed"):
            lines.append(
                f"{name} steps: mean absolute error {error.mape:.2f} %, mean {error.bias:+.2f} %,"
                f" of the total time {error.time_bias:+.2f} %{_ahead(comparison, name)}"
            )
    lines.append(f"host time between steps: {comparison.steps.gap_error:+.2f} % of the time")
    pauses = comparison.profile.pauses
    if pauses is not None and has_pauses(run, comparison.profile):
        lines.append(
            "with pauses of the recording process: one per"
            f" {pauses.every_entries:,} scheduled entries, {pauses.ns_per_entry:,.0f} ns long for"
            " each entry scheduled up to then"
        )
    if comparison.overload > OVERLOAD_SHARE:
        lines.append(
            f"OVERLOADED: requests waited in {comparison.overload:.0%} of the time, so latencies"
            " are queueing and every error of the step times adds up over the backlog"
        )
    if comparison.num_extrapolated:
        share = comparison.num_extrapolated / free.num_steps
        lines.append(f"{share:.1%} of the free-running steps lie outside the calibrated range")
    if comparison.intervals is not None:
        rows = comparison.rows()
        covered = sum(bool(row["covered"]) for row in rows)
        lines.append(
            f"intervals of {comparison.intervals.num_replicates} replicates cover"
            f" {covered} of {len(rows)} recorded figures"
        )
    return lines


def _ahead(comparison: Comparison, name: str) -> str:
    error = comparison.steps.ahead.get(name)
    if error is None:
        return ""
    return f"; told the times of all steps before, {error.mape:.2f} %"


def render_validation(comparisons: Sequence[Comparison]) -> str:
    """The whole page."""
    sections = {}
    for comparison in comparisons:
        items = "".join(f"<li>{escape(line)}</li>" for line in notes(comparison))
        sections[comparison.run.name] = (
            f"<ul>{items}</ul>"
            + html_table(header(comparison), text_rows(comparison))
            + figures(_charts(comparison))
        )
    return page(
        "Predicted against recorded runs",
        "Teacher-forced: the kernel under the recorded step times. Free-running: the simulator with"
        " predicted step times, fed the recorded arrivals only; without noise, and as the median of"
        " replicates with the noise of recorded steps.",
        sections,
    )


def _charts(comparison: Comparison) -> dict[str, str]:
    sides = {"recorded": comparison.run.outcome, "free-running": comparison.free}
    charts = {}
    for title, values_of in (
        ("TTFT", lambda one: (one.first_token_ns - one.arrival_ns) / NS_PER_MS),
        ("TPOT", _tpots),
        ("E2E", lambda one: (one.finish_ns - one.arrival_ns) / NS_PER_MS),
    ):
        series = [_cdf(name, values_of(side)) for name, side in sides.items()]
        charts[f"{title} of requests"] = line_chart(
            series, "ms", "share of requests", log_x=True, y_max=1.0, steps=True
        )
    charts["Running requests"] = line_chart(
        [Series(name, *_binned(one, "running")) for name, one in sides.items()], "s", "requests"
    )
    charts["KV blocks in use, % of the pool"] = line_chart(
        [Series(name, *_binned(one, "kv_blocks")) for name, one in sides.items()], "s", "%"
    )
    charts["TTFT by arrival"] = line_chart(
        [
            Series(
                name,
                (one.arrival_ns / 1e9).tolist(),
                ((one.first_token_ns - one.arrival_ns) / NS_PER_MS).tolist(),
            )
            for name, one in sides.items()
        ],
        "s",
        "ms",
    )
    return charts


def _tpots(outcome: Outcome) -> Floats:
    many = outcome.output_tokens > 1
    spans = (outcome.finish_ns - outcome.first_token_ns)[many] / NS_PER_MS
    tpots: Floats = spans / (outcome.output_tokens[many] - 1)
    return tpots


def _cdf(name: str, values: Floats) -> Series:
    ordered = np.sort(values)
    shares = np.arange(1, len(ordered) + 1) / max(1, len(ordered))
    return Series(name, ordered.tolist(), shares.tolist())


def _binned(outcome: Outcome, curve: str, num_bins: int = 200) -> tuple[list[float], list[float]]:
    """Means over equal stretches of time; a curve holds its value up to its next point."""
    times = np.asarray(outcome.curves.time_s, dtype=float)
    values = np.asarray(getattr(outcome.curves, curve), dtype=float)
    if curve == "kv_blocks":
        values = 100 * values / outcome.num_blocks
    grid = np.linspace(0, outcome.end_ns / 1e9, num_bins * 10)
    held = values[np.clip(np.searchsorted(times, grid, side="right") - 1, 0, len(values) - 1)]
    means = held.reshape(num_bins, 10).mean(axis=1)
    return grid.reshape(num_bins, 10).mean(axis=1).tolist(), means.tolist()
