"""`lockstep golden record`, and `golden check --reference`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

from engine.arguments.files import check_writable
from engine.arguments.parser import VerbParser
from golden.check.model_options import add_model_options, finish, plan_of, say

HEADER = ("run", "status", "positions", "largest error", "c", "pooled", "KL mean", "agreement",
          "too close")  # fmt: skip


def record_main(argv: Sequence[str]) -> int:
    """`lockstep golden record`."""
    parser = VerbParser("golden record", "Compute HF's truth of a model once, into a file.")
    add_model_options(parser)
    parser.option("out", required=True, detail="ends with .safetensors")
    parser.option("top_tokens", 64)
    args = parser.parse(argv)
    check_writable("out", args.out, ".safetensors")
    from golden.stored.make_reference import make_reference
    from golden.stored.reference_file import write_reference

    reference = make_reference(plan_of(args), args.top_tokens, say)
    size = write_reference(reference, args.out)
    positions = reference.num_positions
    print(
        f"wrote {args.out}: {len(reference.sequences)} prompts, {positions:,} positions, "
        f"{size / positions:,.0f} bytes each"
    )
    return 0


def check_against(args: argparse.Namespace, engine: dict[str, object], command: str) -> int:
    """`lockstep golden check --reference`."""
    from golden.check.check_plan import CheckPlan
    from golden.record import make_record
    from golden.stored.reference_file import read_reference
    from golden.stored.stored_check import check_stored

    reference = read_reference(args.reference)
    started = time.perf_counter()
    outcome = check_stored(CheckPlan(args.model, engine), reference, say)
    seconds = time.perf_counter() - started
    record = make_record(outcome.cases, command, outcome.device, None, seconds)
    record["reference_check"] = outcome.to_json()
    lines = lines_of(record, record["reference_check"]["runs"])
    return finish(args, record, lines, lambda: to_page(record, record["reference_check"]["runs"]))


def rows_of(record: Mapping[str, Any], runs: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Cells of the table."""
    from golden.case_table import number

    rows = []
    for case in record["cases"]:
        stats = runs.get(case["name"], {})
        rows.append(
            [
                case["name"],
                case["status"],
                number(stats.get("num_positions"), ",d"),
                number(stats.get("max_error"), ".2g"),
                number(stats.get("observed_c"), ".2f"),
                number(stats.get("pooled_ratio"), ".2f"),
                number(stats.get("kl_mean"), ".1e"),
                number(stats.get("agreement"), ".2%"),
                number(stats.get("close_share"), ".1%"),
            ]
        )
    return rows


def lines_of(record: Mapping[str, Any], runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The table and what stands below it."""
    from golden.case_table import summary_lines
    from sim.report.tables import text_table

    table = text_table(HEADER, rows_of(record, runs))
    return [table, "", *findings(runs), *summary_lines(record)]


def findings(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Greedy path and perplexity of the first run."""
    if not runs:
        return []
    first = next(iter(runs.values()))
    lines = []
    if first["greedy_tokens"]:
        lines.append(
            f"greedy: {first['equal_tokens']} of {first['greedy_tokens']} tokens come before the "
            "first difference from the reference"
        )
        lines += [f"  {line}" for line in first["divergences"]]
    if first["perplexity"] is not None:
        lines.append(
            f"perplexity of the prompts: here {first['perplexity']:.4f}, "
            f"reference {first['reference_perplexity']:.4f}"
        )
    return lines


def to_page(record: Mapping[str, Any], runs: Mapping[str, Mapping[str, Any]]) -> str:
    """The record as one HTML page."""
    from golden.case_table import summary_lines, verdict_page
    from sim.report.tables import html_table

    rows = rows_of(record, runs)
    return verdict_page(
        "Golden check against a reference",
        record["device"],
        record,
        {"Runs": html_table(HEADER, rows, classes=[row[1] for row in rows])},
        [*findings(runs), *summary_lines(record)],
    )
