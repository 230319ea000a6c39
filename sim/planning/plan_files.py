"""The answer in words, as a ranked table, and as `plan.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.steplog.atomic import write_text
from engine.steplog.output_folder import OutputFolder, read_json
from sim.planning.cache import code_digest, plain
from sim.planning.capacity import SeedCapacity
from sim.planning.confirm import Confirmation
from sim.planning.entries import Entry
from sim.planning.result import Plan
from sim.planning.start_commands import commands_of
from sim.planning.trial import TrialResult
from sim.report.page import is_page
from sim.report.tables import number
from sim.run.deployment import build, versions

PLAN, REPORT, CACHE = "plan.json", "report.html", "cache"
FORMAT = "lockstep-plan"
VERSION = 1
TABLE_HEADER = ("configuration", "GPUs", "capacity", "interval", "per GPU", "$/h", "$/M out",
                "p99 TTFT", "p99 TPOT", "gives way", "limited by")  # fmt: skip


def write_plan(plan: Plan, path: Path) -> None:
    """Writes `plan.json`; no clock, path or number of processes goes in, so reruns are equal."""
    text = json.dumps(plan_document(plan), indent=1, allow_nan=False) + "\n"
    write_text(path, text)


def plan_folder(out: Path) -> OutputFolder:
    """The folder of a plan's results, in which its study and its cache may stand."""
    return OutputFolder(out, {PLAN: _is_plan, REPORT: is_page}, last=PLAN, shared=True)


def _is_plan(path: Path) -> bool:
    document = read_json(path)
    return isinstance(document, dict) and document.get("format") == FORMAT


def plan_document(plan: Plan) -> dict[str, Any]:
    """The plan as JSON data."""
    study, best = plan.study, plan.best
    return {
        "format": FORMAT,
        "version": VERSION,
        "study": _study_document(plan),
        "answer": answer(plan),
        "recommended": None if best is None else best.candidate.name,
        "commands": [] if best is None else commands_of(best.candidate),
        "confirmed": None if plan.confirmation is None else plan.doubt is None,
        "confirmation": _confirmation_document(plan.confirmation),
        "ranking": [_entry_document(entry, plan) for entry in plan.entries],
        "left_out": [
            {"configuration": candidate.name, "reason": reason}
            for candidate, reason in plan.left_out
        ],
        "warnings": plan.warnings,
        "rate_unit": plan.source.rate_unit,
        "objective": asdict(study.objective),
        "code": code_digest(),
        "trace_sha256": plan.source.digest or None,
        "versions": versions(),
    }


def answer(plan: Plan) -> str:
    """The answer to the study's question in one sentence."""
    study, best, unit = plan.study, plan.best, plan.source.rate_unit
    if best is None:
        return _no_answer(plan)
    gpus = best.candidate.num_gpus()
    what = f"{best.candidate.name}: {gpus} GPU{'s' if gpus > 1 else ''}"
    interval = best.interval(study)
    capacity = best.capacity
    if capacity is None:
        return f"{what} serve {study.objective.rate:g} {unit}, capacity unknown"
    spread = "one seed"
    if interval is not None:
        spread = f"{study.search.confidence:.0%}: {interval.low:.4g} to {interval.high:.4g}"
        spread += f", {len(best.seeds)} seeds"
    if best.searched is not None:
        spread = f"short runs {best.searched:.4g}, {spread}"
    figure = f"{capacity:.4g} {unit} ({spread})"
    if plan.doubt is not None:
        return f"not confirmed: {what} were found to have a capacity of {figure}; {plan.doubt}"
    if plan.confirmation is None:
        return f"{what} have a capacity of {figure} in the search; no long runs were asked for"
    verb = "sustains" if gpus == 1 else "sustain"
    return (
        f"{what} {verb} {figure}; long runs with fresh seeds confirm it ({plan.confirmation.found})"
    )


def _no_answer(plan: Plan) -> str:
    study = plan.study
    working = [entry for entry in plan.entries if entry.failure is None]
    if not working:
        return f"every configuration failed; the first: {plan.entries[0].failure}"
    near = min(
        (entry for entry in working if entry.closest() is not None),
        key=lambda entry: (entry.closest() or TrialResult(None, 0, 0)).worst or 0.0,
        default=None,
    )
    at = "" if study.objective.rate is None else f" at {study.objective.rate:g}"
    text = f"nothing meets the SLO ({study.slo.describe()}){at}"
    run = near.closest() if near is not None else None
    if near is None or run is None or run.worst is None:
        return f"{text}; no run came near enough to say by how much"
    shown = f"{run.worst:.3g} x its limit"
    latency = run.latencies_ms.get(run.binding)
    if latency is not None:
        shown = f"{run.binding} {latency:.4g} ms, {shown}"
    return f"{text}; the closest is {near.candidate.name} at {run.rate:.4g}: {shown}"


def table_rows(plan: Plan) -> list[list[str]]:
    """Cells of the ranked table."""
    return [_row(entry, plan) for entry in plan.entries]


def _row(entry: Entry, plan: Plan) -> list[str]:
    study = plan.study
    gpus, price = entry.candidate.num_gpus(), entry.candidate.price_per_hour(study.prices)
    cells = [entry.candidate.name, str(gpus)]
    if entry.failure is not None:
        return [*cells, "failed", entry.failure[:60], "", "", "", "", "", "", ""]
    interval, capacity = entry.interval(study), entry.capacity
    if capacity is None and entry.at_rate:
        rate = study.objective.rate or 0.0
        cells += [f"{_at_rate(entry)} {rate:.4g}", "", ""]
    elif capacity is None:
        cells += ["none", "", ""]
    else:
        spread = "one seed" if interval is None else f"{interval.low:.4g}-{interval.high:.4g}"
        cells += [number(capacity), spread, number(capacity / gpus)]
    cost = entry.cost_per_million_tokens(study, study.objective.rate if entry.serves else None)
    latencies = entry.mean_latencies_ms()
    limit, resource, _ = entry.limited_by()
    cells += ["-" if price is None else f"{price:.2f}", "-" if cost is None else f"{cost:.3f}"]
    cells += [number(latencies.get("p99 ttft")), number(latencies.get("p99 tpot"))]
    return [*cells, limit, resource]


def _at_rate(entry: Entry) -> str:
    if entry.uncertain:
        return "unsure at"
    return "serves" if entry.serves else "misses"


def _study_document(plan: Plan) -> dict[str, Any]:
    study = plan.study
    workload = asdict(study.workload)
    workload["trace"] = None if study.workload.trace is None else study.workload.trace.name
    return {
        "name": study.name,
        "workload": workload,
        "slo": study.slo.describe(),
        "axes": {axis: list(values) for axis, values in study.axes.items()},
        "fleets": {name: [asdict(one) for one in groups] for name, groups in study.fleets.items()},
        "prices": dict(study.prices),
        "kv_transfer": asdict(study.link),
        "search": asdict(study.search),
    }


def _entry_document(entry: Entry, plan: Plan) -> dict[str, Any]:
    study = plan.study
    interval = entry.interval(study)
    limit, resource, why = entry.limited_by() if entry.failure is None else ("", "", "")
    rate = study.objective.rate
    return {
        "configuration": dict(entry.candidate.label),
        "router": entry.candidate.router,
        "servers": [
            {
                "role": group.role,
                **_deployment_document(asdict(group.deployment)),
                "trust": None if entry.failure else build(group.deployment, 0).trust.to_json(),
            }
            for group in entry.candidate.groups
        ],
        "gpus": entry.candidate.num_gpus(),
        "price_per_hour": entry.candidate.price_per_hour(study.prices),
        "capacity": entry.capacity,
        "interval": None if interval is None else [interval.low, interval.high],
        "capacity_of_seeds": {str(seed.seed): seed.rate for seed in entry.seeds},
        "goodput": entry.goodput(),
        "cost_per_million_output_tokens": entry.cost_per_million_tokens(
            study, rate if entry.serves else None
        ),
        "contradicted": entry.searched,
        "confirmation": _confirmation_document(entry.confirmation),
        "uncertain": entry.uncertain,
        "serves_rate": entry.serves if entry.at_rate else None,
        "latencies_ms": entry.mean_latencies_ms(),
        "usage": entry.mean_usage(),
        "gives_way": limit,
        "limited_by": resource,
        "why": why,
        "notes": entry.notes,
        "failure": entry.failure,
        "runs": [run for seed in entry.seeds for run in _runs(seed)]
        + [plain(run) for run in entry.at_rate],
    }


def _deployment_document(deployment: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in deployment.items() if key != "roofline"}
    for option in ("expert_parallel", "async_scheduling"):
        if not kept[option]:
            del kept[option]
    for key in ("model", "cost"):
        # A path says where a file lay, not what it holds.
        head, separator, tail = str(kept[key]).rpartition("/")
        if separator and Path(str(kept[key]).partition(":")[2] or str(kept[key])).exists():
            kind = head.partition(":")[0] + ":" if ":" in head else ""
            kept[key] = kind + tail
    return kept


def _runs(seed: SeedCapacity) -> list[dict[str, Any]]:
    return [plain(seed.tested[rate]) for rate in sorted(seed.tested)]


def _confirmation_document(confirmation: Confirmation | None) -> dict[str, Any] | None:
    if confirmation is None:
        return None
    return {
        "confirmed": confirmation.confirmed,
        "capacity": confirmation.capacity,
        "searched": confirmation.searched,
        "error": confirmation.error,
        "below": [plain(run) for run in confirmation.below],
        "above": [plain(run) for run in confirmation.above],
    }
