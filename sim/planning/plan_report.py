"""The HTML report of a plan: one file with tables, plots and command lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from sim.planning.entries import Entry
from sim.planning.plan_files import TABLE_HEADER, answer, plan_document, table_rows
from sim.planning.result import Plan
from sim.planning.start_commands import commands_of
from sim.planning.trial import TrialResult
from sim.report.headline import gpus_text
from sim.report.marks import Guide, Marks, marked_chart, pareto_front
from sim.report.page import figures, page
from sim.report.svg import COLOURS
from sim.report.tables import html_table, number
from sim.run.deployment import Deployment, build

# One colour is left for the Pareto front.
_MOST_LINES = len(COLOURS) - 1
_USAGE = (
    ("busy", "busy"),
    ("mfu", "MFU"),
    ("mbu", "MBU"),
    ("kv_mean", "KV mean"),
    ("kv_peak", "KV peak"),
    ("seqs_full", "full batches"),
    ("budget", "fill of prompt steps"),
    ("steps_with_prompts", "time with prompts"),
    ("hit_rate", "prefix hits"),
)


def render_plan(plan: Plan, command: str = "") -> str:
    """The whole page; `command` is the one that repeats the study."""
    study = plan.study
    lead = f"{plan.source.name}; SLO: {study.slo.describe()}"
    sections = {
        "Answer": _answer(plan, command),
        "Configurations, best first": html_table(TABLE_HEADER, table_rows(plan)) + _left_out(plan),
        "Rate, goodput and latency": figures(_rate_charts(plan)),
        "Cost and latency": figures(_pareto_charts(plan)),
        "What limits each configuration": _limits(plan),
        "Command lines": _commands(plan),
        "Confirmation": _confirmation(plan),
        "Notes": _notes(plan),
        "How this plan was made": _provenance(plan),
    }
    return page(study.name, lead, {name: text for name, text in sections.items() if text})


def _answer(plan: Plan, command: str) -> str:
    warnings = "".join(f'<p class="warn">{escape(text)}</p>' for text in plan.warnings)
    gpus = ""
    if plan.best is not None:
        groups = [_gpus(group.deployment) for group in plan.best.candidate.groups]
        trusts = {build(one.deployment, 0).trust.error_class for one in plan.best.candidate.groups}
        gpus = f"<p>That takes {escape(' and '.join(groups))}.</p>"
        gpus += f"<p>Measured error of its cost model: {escape('; '.join(sorted(trusts)))}.</p>"
    again = f"<p>Repeat it with</p><pre>{escape(command)}</pre>" if command else ""
    return f"<p><strong>{escape(answer(plan))}</strong></p>{gpus}{warnings}{again}"


def _gpus(deployment: Deployment) -> str:
    return gpus_text(deployment.replicas, deployment.tp, deployment.hardware)


def _left_out(plan: Plan) -> str:
    if not plan.left_out:
        return ""
    rows = [[candidate.name, reason] for candidate, reason in plan.left_out]
    return "<p>Left out:</p>" + html_table(("configuration", "reason"), rows)


# Plots ------------------------------------------------------------------------------------------


def _shown(plan: Plan) -> list[Entry]:
    known = [entry for entry in plan.entries if entry.failure is None]
    return known[:_MOST_LINES]


def _rate_charts(plan: Plan) -> dict[str, str]:
    unit = plan.source.rate_unit
    goodput, ratios = [], []
    for entry in _shown(plan):
        runs = entry.complete_runs()
        name = entry.candidate.name
        goodput.append(Marks(name, _mean_points(runs, "goodput")))
        ratios.append(Marks(name, _mean_points(runs, "worst")))
    highest = max((x for one in goodput for x, _ in one.points), default=1.0)
    share = plan.study.slo.least_share()
    guides = [Guide("all requests good", (0, 0), (highest, highest))]
    if share is not None and share < 1:
        guides = [Guide(f"SLO: {share:.3g} of the rate", (0, 0), (highest, share * highest))]
    return {
        "Goodput against rate (whole runs only)": marked_chart(
            goodput, f"offered {unit}", "requests/s within all limits", guides
        ),
        "Latency nearest to its limit (whole runs only)": marked_chart(
            ratios, f"offered {unit}", "latency / limit", [Guide("SLO", (0, 1), (highest, 1))], 2.0
        ),
    }


def _mean_points(runs: Sequence[TrialResult], field: str) -> list[tuple[float, float]]:
    by_rate: dict[float, list[float]] = {}
    for run in runs:
        value = getattr(run, field)
        if run.rate is not None and value is not None:
            by_rate.setdefault(run.rate, []).append(value)
    return [(rate, sum(values) / len(values)) for rate, values in by_rate.items()]


def _pareto_charts(plan: Plan) -> dict[str, str]:
    """Each whole run is a point; the line joins those that no other beats."""
    priced = bool(plan.study.prices)
    unit = "$ per million output tokens" if priced else "GPU hours per million output tokens"
    charts = {}
    names = {limit.name: limit.limit_ms for limit in plan.study.slo.limits}
    for name in names or {"p99 ttft": 0.0, "p99 tpot": 0.0}:
        marks, every = [], []
        for entry in _shown(plan):
            points = [
                (cost, latency)
                for run in entry.complete_runs()
                if (latency := run.latencies_ms.get(name)) is not None
                and (cost := _cost(entry, plan, run)) is not None
            ]
            every += points
            marks.append(Marks(entry.candidate.name, points, line=False))
        # Overload would stretch the axis without telling anything.
        top = 2 * names[name] if name in names else None
        inside = [point for point in every if top is None or point[1] <= top]
        marks.append(Marks("Pareto front", pareto_front(inside), colour=COLOURS[_MOST_LINES]))
        right = max((x for x, _ in every), default=1.0)
        guides = [Guide("SLO", (0, names[name]), (right, names[name]))] if name in names else []
        charts[f"{name} against cost"] = marked_chart(marks, unit, f"{name}, ms", guides, top)
    return charts


def _cost(entry: Entry, plan: Plan, run: TrialResult) -> float | None:
    if not run.throughput or run.rate is None:
        return None
    price = entry.candidate.price_per_hour(plan.study.prices) or float(entry.candidate.num_gpus())
    tokens_per_s = run.rate * run.output_tokens_per_s / run.throughput
    return price / 3600 / tokens_per_s * 1e6


# Tables -----------------------------------------------------------------------------------------


def _limits(plan: Plan) -> str:
    rows = []
    for entry in plan.entries:
        usage = entry.mean_usage()
        if entry.failure is not None or not usage:
            continue
        limit, resource, why = entry.limited_by()
        rows.append(
            [entry.candidate.name, limit, resource, why]
            + [f"{usage[key]:.1%}" for key, _ in _USAGE]
        )
    if not rows:
        return ""
    header = (
        "configuration",
        "gives way first",
        "limited by",
        "why",
        *(name for _, name in _USAGE),
    )
    return html_table(header, rows)


def _commands(plan: Plan) -> str:
    if plan.best is None:
        return ""
    parts = []
    candidate = plan.best.candidate
    for one, group in zip(commands_of(candidate), candidate.groups, strict=True):
        role = "" if group.role == "mixed" else f"{group.role}: "
        parts.append(f"<p>{escape(role + _gpus(group.deployment))}, each replica with</p>")
        lines = [str(line) for line in (one["vllm"], one["lockstep"]) if line is not None]
        parts.append(f"<pre>{escape(chr(10).join(lines))}</pre>")
    return "".join(parts)


def _confirmation(plan: Plan) -> str:
    confirmation = plan.confirmation
    if confirmation is None:
        return ""
    rows = [
        [
            where,
            number(run.rate),
            str(run.seed),
            number(run.num_requests),
            "met" if run.met else "missed",
            run.binding,
            "stopped early" if run.worst is None else number(run.worst),
        ]
        for where, runs in (("below", confirmation.below), ("above", confirmation.above))
        for run in runs
    ]
    header = ("the interval", "rate", "seed", "requests", "SLO", "nearest limit", "of its limit")
    return html_table(header, rows)


def _notes(plan: Plan) -> str:
    rows = [[entry.candidate.name, note] for entry in plan.entries for note in entry.notes]
    return html_table(("configuration", "note"), rows) if rows else ""


def _provenance(plan: Plan) -> str:
    document = plan_document(plan)
    kept = {
        key: document[key] for key in ("study", "objective", "code", "trace_sha256", "versions")
    }
    return f"<pre>{escape(json.dumps(kept, indent=1))}</pre>"
