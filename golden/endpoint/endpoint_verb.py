"""`lockstep golden endpoint`: asks whether the outputs of a server are right."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

from engine.arguments.files import check_writable
from engine.arguments.parser import VerbParser
from golden.check.model_options import finish, say

HEADER = ("requests", "status", "values", "largest error", "c", "pooled", "KL mean", "agreement",
          "greedy", "other numbers", "by", "other texts")  # fmt: skip
RULES = ("log-probabilities", "pooled error", "KL divergence", "greedy tokens")


def main(argv: Sequence[str]) -> int:
    """`lockstep golden endpoint`: 0 if all rules are kept, 1 if one is broken, 2 if none can be."""
    parser = VerbParser("golden endpoint", __doc__)
    parser.option("url", required=True)
    parser.option("reference", required=True)
    parser.option("served_model", detail="else the first one that it lists")
    parser.option("dtype", "auto", detail="what it computes in; auto is the checkpoint's own")
    parser.option("concurrency", [1, 8])
    parser.option("repeats", 2)
    parser.option("timeout_s", 120.0)
    parser.option("json", detail="the record to standard output")
    parser.option("out", detail="the record as JSON")
    parser.option("html")
    args = parser.parse(argv)
    check_writable("out", args.out)
    check_writable("html", args.html, ".html")
    from golden.endpoint.http_client import Client
    from golden.endpoint.levels import EndpointPlan, check_endpoint
    from golden.stored.reference_file import read_reference

    client = Client(args.url, args.timeout_s)
    reference = read_reference(args.reference)
    dtype = reference.about["checkpoint_dtype"] if args.dtype == "auto" else args.dtype
    plan = EndpointPlan(client, args.served_model, dtype, tuple(args.concurrency), args.repeats)
    started = time.perf_counter()
    outcome = check_endpoint(plan, reference, say)
    record = _record(outcome, shlex.join(["lockstep", "golden", "endpoint", *argv]), started)
    return finish(args, record, lines_of(record), lambda: to_page(record))


def _record(outcome: Any, command: str, started: float) -> dict[str, Any]:  # noqa: ANN401
    import torch

    from golden.record import make_record
    from golden.results import CaseResult

    cases = [
        CaseResult(
            "endpoint",
            result.name,
            "pass" if result.stats.passed else "fail",
            "; ".join(result.stats.violations),
        )
        for result in outcome.results
    ]
    seconds = time.perf_counter() - started
    record = make_record(cases, command, torch.device("cpu"), None, seconds)
    record["endpoint"] = outcome.to_json()
    return record


def rows_of(record: Mapping[str, Any]) -> list[list[str]]:
    """Cells of the table."""
    from golden.case_table import number

    rows = []
    for case, one in zip(record["cases"], record["endpoint"]["passes"], strict=True):
        stats = one["stats"]
        rows.append(
            [
                case["name"],
                case["status"],
                number(stats.get("num_values"), ",d"),
                number(stats.get("max_error"), ".2g"),
                number(stats.get("observed_c"), ".2f"),
                number(stats.get("pooled_ratio"), ".2f"),
                number(stats.get("kl_mean"), ".1e"),
                number(stats.get("agreement"), ".2%"),
                f"{stats['equal_tokens']} of {stats['greedy_tokens']}",
                f"{one['num_other']} of {one['num_answers']}",
                f"{one['largest_difference']:.2g}",
                str(one["num_other_texts"]),
            ]
        )
    return rows


def lines_of(record: Mapping[str, Any]) -> list[str]:
    """The table and what stands below it."""
    from golden.case_table import summary_lines
    from sim.report.tables import text_table

    return [text_table(HEADER, rows_of(record)), "", *findings(record), *summary_lines(record)]


def findings(record: Mapping[str, Any]) -> list[str]:
    """Which rules could be judged, where texts part, and whether load or chance change answers."""
    found = record["endpoint"]
    passes = found["passes"]
    judged = passes[0]["stats"]["judged"]
    lines = [
        f"{found['model']} judged as {found['dtype']}; it tells {found['tells']}",
        f"judged: {', '.join(judged) or 'nothing'}",
    ]
    unjudged = [rule for rule in RULES if rule not in judged]
    if found["dtype"] == "float32":
        unjudged = [rule for rule in unjudged if rule != "pooled error"]
    if unjudged:
        lines.append(f"not judged, since the server does not tell enough: {', '.join(unjudged)}")
    lines += [f"refused by the server, {line}" for line in found["refused"]]
    lines += [f"  {line}" for line in passes[0]["stats"]["divergences"]]
    lines += _stability(passes)
    return lines


def _stability(passes: Sequence[Mapping[str, Any]]) -> list[str]:
    """What repeating and what load change; the rules say whether it matters."""
    first = passes[0]["concurrency"]
    again = [one for one in passes[1:] if one["concurrency"] == first]
    loaded = [one for one in passes if one["concurrency"] != first]
    lines = []
    for what, those in (("repeated", again), ("under another load", loaded)):
        if not those:
            continue
        other = max(one["num_other"] for one in those)
        largest = max(one["largest_difference"] for one in those)
        texts = max(one["num_other_texts"] for one in those)
        if not other and not texts:
            lines.append(f"{what}: the same numbers every time")
        else:
            lines.append(
                f"{what}: other numbers in {other} of {those[0]['num_answers']} answers, by at "
                f"most {largest:.2g}; other texts: {texts}"
            )
    return lines


def to_page(record: Mapping[str, Any]) -> str:
    """The record as one HTML page."""
    from golden.case_table import summary_lines, verdict_page
    from sim.report.tables import html_table

    rows = rows_of(record)
    return verdict_page(
        "Golden check of a server",
        record["endpoint"]["model"],
        record,
        {"Passes": html_table(HEADER, rows, classes=[row[1] for row in rows])},
        [*findings(record), *summary_lines(record)],
    )
