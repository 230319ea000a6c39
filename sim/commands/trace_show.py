"""`lockstep trace show`: what the simulator takes a trace for, before it is used."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from engine.arguments.parser import VerbParser
from engine.core.errors import ConfigError
from sim.commands.options import answer_length
from sim.run.option_table import SIM_TABLE
from sim.workloads.measured import latencies_of
from sim.workloads.readers import Opened, TraceOptions, open_trace, read_trace
from sim.workloads.servegen import ServeGenOptions, is_servegen, read_servegen
from sim.workloads.table import Workload
from sim.workloads.text import read_rows

_OPTIONS = (
    "num_requests", "chars_per_token", "hash_block_tokens", "window_start", "window_length",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Prints what is in a trace; returns the exit code 0.

    Raises:
        ConfigError, InputError: the file is of no known format, or a row is wrong.
    """
    parser = VerbParser("trace show", "Show what the simulator takes a trace for.", SIM_TABLE)
    parser.add_argument("trace", type=Path, metavar="FILE", help="the trace")
    for name in _OPTIONS:
        parser.option(name)
    parser.option("on_bad_row", "leave-out")
    parser.option("tokenizer", detail="for a trace of texts")
    parser.option("output_len", detail="of prompts without answers")
    parser.option("json")
    arguments = parser.parse(argv)
    sheet = trace_sheet(arguments)
    print(json.dumps(sheet, indent=2) if arguments.json else _text(sheet))
    return 0


def trace_sheet(arguments: argparse.Namespace) -> dict[str, object]:
    """What is known of a trace."""
    path: Path = arguments.trace
    if is_servegen(path):
        options = ServeGenOptions(
            arguments.window_start or 0,
            600 if arguments.window_length is None else arguments.window_length,
            num_requests=arguments.num_requests,
        )
        return {"format": "servegen", **_sizes(read_servegen(path, options), timed=True)}
    opened = open_trace(path, arguments.hash_block_tokens)
    needs = _needs(opened, arguments)
    sheet: dict[str, object] = {"format": opened.format.name}
    # Without what it needs, the requests are counted with lengths that are not shown.
    workload = read_trace(path, _options(opened, arguments))
    sheet.update(_sizes(workload, opened.timed))
    if "--tokenizer or --chars-per-token" in needs:
        sheet["input_tokens"] = None
        if "text" in _answers(path):
            sheet["output_tokens"] = None
    if "--output-len" in needs:
        sheet["output_tokens"] = None
    sheet["needs"] = needs
    if workload.hashed is not None:
        sheet["hash_block_tokens"] = workload.hashed.block_tokens
        sheet["distinct_blocks"] = len(set(workload.hashed.ids))
        sheet["answer_blocks"] = len(workload.hashed.answers)
    if workload.priorities is not None:
        sheet["priorities"] = sorted(set(workload.priorities))
    if opened.format.measured:
        sheet["measured"] = latencies_of(path, read_rows(path))
    return sheet


def _options(opened: Opened, arguments: argparse.Namespace) -> TraceOptions:
    chars = arguments.chars_per_token
    if opened.format.text and arguments.tokenizer is None and chars is None:
        chars = 4
    return TraceOptions(
        num_requests=arguments.num_requests,
        rate=None if opened.timed else 1.0,
        chars_per_token=chars,
        tokenizer=arguments.tokenizer,
        hash_block_tokens=arguments.hash_block_tokens,
        output_tokens=answer_length(arguments.output_len) or (1 if opened.format.text else None),
        window_start_s=arguments.window_start or 0,
        window_length_s=arguments.window_length,
        on_bad_row=arguments.on_bad_row,
    )


def _needs(opened: Opened, arguments: argparse.Namespace) -> list[str]:
    """The options without which a run cannot use the trace."""
    needs = [] if opened.timed else ["--rate"]
    if not opened.format.text:
        return needs
    if arguments.tokenizer is None and arguments.chars_per_token is None:
        needs.append("--tokenizer or --chars-per-token")
    if arguments.output_len is None and "nothing" in _answers(arguments.trace):
        needs.append("--output-len")
    return needs


def _answers(path: Path) -> set[str]:
    """What the answers of a trace of texts are: text, length or nothing."""
    kinds = {str: "text", type(None): "nothing"}
    return {kinds.get(type(row.fields.get("answer")), "length") for row in open_trace(path).rows}


def _sizes(workload: Workload, timed: bool) -> dict[str, object]:
    known = [time for time in workload.arrival_ns if time >= 0]
    left_out = workload.left_out
    if not len(workload):
        raise ConfigError("window_start", None, f"no request of {workload.name} lies in the window")
    return {
        "requests": len(workload),
        "input_tokens": sum(workload.prompt_tokens),
        "output_tokens": sum(workload.output_tokens),
        "sessions": workload.num_sessions,
        "span_s": (known[-1] - known[0]) / 1e9 if timed else None,
        "rows_left_out": sum(left_out.values()),
        "left_out": dict(left_out),
        "notes": list(workload.notes),
    }


def _text(sheet: dict[str, object]) -> str:
    lines = []
    for key, value in sheet.items():
        if value in ([], {}, None):
            continue
        shown = f"{value:,}" if isinstance(value, int) else str(value)
        if isinstance(value, dict):
            shown = "; ".join(f"{name}: {one:,}" for name, one in value.items())
        elif isinstance(value, list):
            shown = "; ".join(str(one) for one in value)
        lines.append(f"  {key.replace('_', ' '):<20}{shown}")
    return "\n".join(lines)
