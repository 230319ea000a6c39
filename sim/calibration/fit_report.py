"""The calibration report: errors, residual plots, coefficients, provenance."""

from __future__ import annotations

import json

from sim.calibration.build import Calibration
from sim.calibration.evaluate import Fold, kinds
from sim.cost.terms import HOST_TERMS, STEP_TERMS
from sim.cost.work import Floats
from sim.report.page import figures, page
from sim.report.scatter import scatter_chart
from sim.report.tables import html_table

_SHOWN = ("decode", "mixed", "mixed_graph", "mixed_eager", "mixed_large")

_AHEAD = (
    "One step ahead: told the recorded times of all steps before it, which show how fast the host"
    " is at the moment. The other errors are of predictions from the plan of a step alone."
)


def render_calibration(result: Calibration) -> str:
    """The whole page."""
    profile = result.profile
    target = profile.target
    folds = result.folds or result.in_sample
    how = (
        "Each log is predicted by a fit to the others"
        if result.folds
        else "A single log: nothing was held out, these errors are in sample"
    )
    provenance = {
        "model": dict(target.model),
        "hardware": target.hardware,
        "dtype": target.dtype,
        "tp": target.tp,
        "engine": target.engine,
        "lockstep": profile.lockstep_version,
        "calibrated_up_to": dict(profile.limits),
        "sources": [dict(source) for source in profile.sources],
    }
    return page(
        f"Calibration of {target.model['name']} on {target.hardware}",
        f"{how}. Engine: {target.engine}",
        {
            "Step time errors, %": _error_table(folds) + f"<p>{_AHEAD}</p>",
            "Residuals": figures(_charts(result)),
            "Coefficients": _coefficients(result),
            "Made from": f"<pre>{json.dumps(provenance, indent=1)}</pre>",
        },
    )


def _error_table(folds: tuple[Fold, ...]) -> str:
    header = ["log", "steps", "count", "mean absolute", "mean", "of the total time",
              "mean absolute, one step ahead"]  # fmt: skip
    rows = []
    for fold in folds:
        for kind in _SHOWN:
            if kind in fold.errors:
                error = fold.errors[kind]
                figures_of = [f"{error.mape:.2f}", f"{error.bias:+.2f}", f"{error.time_bias:+.2f}"]
                label = kind.replace("_", ", ")
                ahead = f"{fold.ahead[kind].mape:.2f}" if kind in fold.ahead else ""
                rows.append([fold.name, label, f"{error.num_steps:,}", *figures_of, ahead])
        rows.append([fold.name, "host gaps", "", "", "", f"{fold.gap_error:+.2f}", ""])
    return html_table(header, rows)


def _coefficients(result: Calibration) -> str:
    profile = result.profile
    pairs = [
        *zip(STEP_TERMS, profile.step_ns, strict=True),
        *zip(HOST_TERMS, profile.host_ns, strict=True),
    ]
    rows = [[term.name, f"{ns / 1e3:.2f}", term.unit, term.meaning] for term, ns in pairs]
    return html_table(["term", "us", "per", "what it is"], rows)


def _charts(result: Calibration) -> dict[str, str]:
    folds = result.folds or result.in_sample
    charts: dict[str, dict[str, tuple[Floats, Floats]]] = {}
    for log, fold in zip(result.logs, folds, strict=True):
        kind = kinds(log, result.profile.graphs)
        decode, mixed = kind == 0, kind > 0
        error = 100 * fold.relative
        tokens = log.column("num_decodes") + log.column("chunk_tokens")
        time_s = (log.start_ns - log.start_ns[0]) / 1e9
        for title, xs, rows in (
            ("Decode steps by batch", log.column("num_decodes"), decode),
            ("Decode steps by context", log.column("decode_context"), decode),
            ("Decode steps over time", time_s, decode),
            ("Mixed steps by tokens", tokens, mixed),
            ("Mixed steps by attention pairs", log.column("chunk_pairs"), mixed),
            ("Mixed steps over time", time_s, mixed),
        ):
            charts.setdefault(title, {})[fold.name] = (xs[rows], error[rows])
    labels = {
        "batch": "sequences",
        "context": "KV tokens",
        "time": "seconds from the start",
        "tokens": "tokens in the step",
        "pairs": "query-key pairs",
    }
    return {
        title: scatter_chart(
            series,
            labels[title.split()[-1]],
            "recorded against predicted, %",
            (-15.0, 15.0) if title.startswith("Decode") else (-50.0, 50.0),
        )
        for title, series in charts.items()
    }
