"""What a check found, for terminals, as JSON and as a page with plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from golden.case_table import number, summary_lines, verdict_page
from golden.check.model_check import CheckOutcome
from golden.check.run_judge import Divergence
from golden.compare import PositionErrors
from golden.record import make_record
from sim.report.page import figures
from sim.report.svg import Series, line_chart
from sim.report.tables import html_table, text_table

HEADER = ("run", "status", "positions", "largest error", "c", "pooled", "KL mean", "agreement",
          "too close", "off base")  # fmt: skip
_PLOTTED = 3  # longest prompts that have a line of their own
_VACUOUS = 0.8


def check_record(outcome: CheckOutcome, command: str, seconds: float) -> dict[str, Any]:
    """A golden record with what a check adds to it."""
    record = make_record(outcome.cases, command, outcome.setting.device, None, seconds)
    base = outcome.base
    record["check"] = {
        "model": outcome.setting.folder.name,
        "architecture": outcome.setting.config.architecture,
        "dtype": str(outcome.setting.dtype).removeprefix("torch."),
        "tensor_parallel_size": outcome.setting.options.tensor_parallel_size,
        "attention_backend": outcome.setting.options.attention_backend,
        "has_tokenizer": outcome.setting.has_tokenizer,
        "prompts": {item.name: len(item.token_ids) for item in outcome.setting.prompts},
        "max_tokens": outcome.setting.max_tokens,
        "memory": outcome.memory,
        "layers": outcome.layers,
    }
    if base is not None:
        record["check"] |= {
            "divergences": [asdict(item) for item in base.divergences],
            "equal_tokens": base.equal_tokens,
            "greedy_tokens": base.greedy_tokens,
            "perplexity": base.perplexity,
            "errors": _joined(base.errors),
        }
    return record


def _joined(pieces: Sequence[PositionErrors]) -> dict[str, dict[str, list[float]]]:
    """Errors by sequence, in the order of positions."""
    found: dict[str, dict[str, list[float]]] = {}
    for piece in pieces:
        one = found.setdefault(piece.name, {"positions": [], "engine": [], "hf": [], "kl": []})
        one["positions"] += piece.positions
        one["engine"] += piece.engine
        one["hf"] += piece.hf
        one["kl"] += piece.kl
    return found


def rows_of(record: Mapping[str, Any]) -> list[list[str]]:
    """Cells of the table."""
    rows = []
    for case in record["cases"]:
        stats, measured = case["stats"] or {}, case["measured"]
        has_yardstick = stats.get("pooled_ratio", 0) > 0
        worst_c = max(stats.get("observed_c", 0.0), stats.get("centred_c", 0.0))
        rows.append(
            [
                case["name"],
                case["status"],
                number(stats.get("num_positions"), ",d"),
                number(stats.get("max_error"), ".2g"),
                f"{worst_c:.2f}" if has_yardstick else "",
                number(stats.get("pooled_ratio"), ".2f") if has_yardstick else "",
                number(stats.get("kl_mean"), ".1e"),
                number(stats.get("agreement"), ".2%"),
                number(stats.get("close_share"), ".1%"),
                number(measured.get("distance_to_base"), ".2g"),
            ]
        )
    return rows


def lines_of(record: Mapping[str, Any]) -> list[str]:
    """The table and what stands below it."""
    return [text_table(HEADER, rows_of(record)), "", *findings(record), *summary_lines(record)]


def findings(record: Mapping[str, Any]) -> list[str]:
    """Greedy paths, perplexities and what the rules could not say."""
    check = record["check"]
    lines = []
    if "perplexity" in check:
        lines.append(
            f"greedy: {check['equal_tokens']} of {check['greedy_tokens']} tokens come before the "
            "first difference from HF in float32"
        )
        lines += [f"  {Divergence(**item).explain()}" for item in check["divergences"]]
        named = {
            "engine": "engine",
            "truth": "HF in float32",
            "yardstick": f"HF in {check['dtype']}",
        }
        found = [
            f"{named[who]} {value:.4f}"
            for who, value in check["perplexity"].items()
            if value is not None
        ]
        if found:
            lines.append(f"perplexity of the prompts: {', '.join(found)}")
    if not check["has_tokenizer"]:
        lines.append("the folder has no tokenizer: the prompts are random tokens")
    closest = max((c["stats"]["close_share"] for c in record["cases"] if c["stats"]), default=0.0)
    if closest > _VACUOUS:
        lines.append(
            f"at up to {closest:.0%} of positions the best two are too close to judge a token by: "
            "here the rules on logits carry the check, not the tokens"
        )
    return lines


def to_page(record: Mapping[str, Any]) -> str:
    """The record as one HTML page with plots."""
    check = record["check"]
    rows = rows_of(record)
    return verdict_page(
        f"Golden check of {check['model']} in {check['dtype']}",
        f"{check['architecture']}, {len(check['prompts'])} prompts, {record['device']}",
        record,
        {
            "Runs": html_table(HEADER, rows, classes=[row[1] for row in rows]),
            "Errors": figures(_charts(check)),
        },
        [*check["memory"], *findings(record), *summary_lines(record)],
    )


def _charts(check: Mapping[str, Any]) -> dict[str, str]:
    errors = check.get("errors", {})
    longest = sorted(errors, key=lambda name: -len(errors[name]["positions"]))[:_PLOTTED]
    engine = [Series(name, *_sorted(errors[name], "engine")) for name in longest]
    charts = {
        "Largest error of a logit by position, engine": line_chart(
            engine, "position", "largest error"
        )
    }
    if any(any(errors[name]["hf"]) for name in longest):
        hf = [Series(name, *_sorted(errors[name], "hf")) for name in longest]
        charts["The same of HF in the dtype"] = line_chart(hf, "position", "largest error")
    kl = [Series(name, *_sorted(errors[name], "kl")) for name in longest]
    charts["KL divergence from HF in float32 by position, engine"] = line_chart(
        kl, "position", "nats"
    )
    layers = [
        Series(who, [float(k + 1) for k in range(len(values))], values)
        for who, values in check["layers"].items()
    ]
    charts["Relative error of the residual stream after each layer"] = line_chart(
        layers, "layer", "error / size"
    )
    return charts


def _sorted(columns: Mapping[str, list[float]], key: str) -> tuple[list[float], list[float]]:
    pairs = sorted(zip(columns["positions"], columns[key], strict=True))
    return [p for p, _ in pairs], [v for _, v in pairs]
