"""One table per run, as Markdown or HTML, from a record."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from sim.report.page import page
from sim.report.tables import html_table

COLUMNS = (
    "group",
    "case",
    "status",
    "positions",
    "observed c",
    "centred c",
    "strict c",
    "pooled ratio",
    "KL mean",
    "KL p99",
    "agreement",
    "HF agreement",
    "too close to judge",
    "decided by the gap",
    "seconds",
)
_STATUS_COLUMN = COLUMNS.index("status")


def table_rows(record: Mapping[str, Any]) -> list[list[str]]:
    """Cells of the report, one row per case."""
    return [_row(case) for case in record["cases"]]


def _row(case: Mapping[str, Any]) -> list[str]:
    stats = case["stats"] or {}
    measured = case["measured"]
    return [
        case["group"],
        case["name"],
        case["status"],
        number(stats.get("num_positions"), "d"),
        number(stats.get("observed_c", measured.get("observed_c")), ".2f"),
        number(stats.get("centred_c"), ".2f"),
        number(stats.get("strict_c"), ".2f"),
        number(stats.get("pooled_ratio", measured.get("pooled_ratio")), ".2f"),
        number(stats.get("kl_mean"), ".1e"),
        number(stats.get("kl_p99"), ".1e"),
        number(stats.get("agreement"), ".2%"),
        number(stats.get("hf_agreement"), ".2%"),
        number(stats.get("close_share"), ".1%"),
        number(stats.get("gap_decided_share"), ".2%"),
        number(case["seconds"], ".1f"),
    ]


def number(value: object, form: str) -> str:
    """A figure as a cell; empty where there is none."""
    if value is None:
        return ""
    return format(value, form) if isinstance(value, int | float) else str(value)


def verdict_page(
    title: str,
    lead: str,
    record: Mapping[str, Any],
    tables: Mapping[str, str],
    findings: Sequence[str],
) -> str:
    """A page that opens with the verdict; below its tables stand findings and the command."""
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in findings)
    sections = {
        **tables,
        "Findings": f"<ul>{lines}</ul>",
        "Command": f"<pre>{html.escape(record['command'])}</pre>",
    }
    verdict = "FAILED: " + record["failure"] if record["failure"] else "All rules are kept."
    kind = "warn" if record["failure"] else "lead"
    return page(title, lead, sections, f'<p class="{kind}">{html.escape(verdict)}</p>')


def summary_lines(record: Mapping[str, Any]) -> list[str]:
    """What ran where, the counts, every skip with its reason, and every failure."""
    counts = record["counts"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines = [
        f"{record['device']}, commit {record['commit']}, {record['date']}, {record['seconds']} s",
        versions,
        f"{counts['pass']} passed, {counts['fail']} failed, {counts['error']} raised, "
        f"{counts['skip']} skipped",
    ]
    for case in record["cases"]:
        if case["status"] != "pass":
            lines.append(f"{case['status']}: {case['group']} / {case['name']}: {case['detail']}")
    if record["failure"]:
        lines.append(f"FAILED: {record['failure']}")
    return lines


def to_markdown(record: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    lines = ["# Golden report", "", f"`{record['command']}`", ""]
    lines += [f"- {_cell(line)}" for line in summary_lines(record)]
    lines += ["", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
    lines += [_line([_cell(cell) for cell in row]) for row in table_rows(record)]
    matrix = _bitwise_rows(record)
    if matrix:
        lines += ["", "## Invariance: which cells are bitwise equal to the base cell", ""]
        lines += [_line(("cell", "bitwise equal", "largest difference")), _line(["---"] * 3)]
        lines += [_line(row) for row in matrix]
    return "\n".join(lines) + "\n"


def _bitwise_rows(record: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            case["name"],
            case["measured"]["bitwise"],
            number(case["measured"]["distance_to_base"], ".2g"),
        ]
        for case in record["cases"]
        if "bitwise" in case["measured"]
    ]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def to_html(record: Mapping[str, Any]) -> str:
    """The report as one HTML page without scripts."""
    summary = "".join(f"<li>{html.escape(line)}</li>" for line in summary_lines(record))
    rows = table_rows(record)
    cases = html_table(COLUMNS, rows, classes=[row[_STATUS_COLUMN] for row in rows])
    sections = {"Summary": f"<ul>{summary}</ul>", "Cases": cases}
    matrix = _bitwise_rows(record)
    if matrix:
        sections["Invariance: which cells are bitwise equal to the base cell"] = html_table(
            ("cell", "bitwise equal", "largest difference"), matrix
        )
    return page("Golden report", record["command"], sections)
