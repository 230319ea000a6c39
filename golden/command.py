"""`lockstep golden`: run the suites, on a CPU or a GPU, explain them, and write their reports."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.arguments.files import check_writable
from engine.arguments.parser import VerbParser
from engine.arguments.suggest import one_of
from engine.core.errors import ConfigError, InputError
from engine.steplog.atomic import write_text

EXPLAIN_TOPICS = ("prefix-cache", "tensor-parallel", "sampling")


def run_main(argv: Sequence[str]) -> int:
    """`lockstep golden run`."""
    parser = VerbParser("golden run", "Every suite in small shapes, on this machine's CPU.")
    _add_run_options(parser)
    return _run(parser.parse(argv))


def gpu_main(argv: Sequence[str]) -> int:
    """`lockstep golden gpu`."""
    parser = VerbParser("golden gpu", "Every suite in 16-bit dtypes and real shapes, on a GPU.")
    _add_run_options(parser)
    parser.option("device", "cuda", detail="auto is cuda")
    parser.option("tiny")
    parser.option("quick")
    parser.option("tp", 1, detail="above 1, ranks are run too")
    parser.option("shape")
    return _gpu(parser.parse(argv))


def explain_main(argv: Sequence[str]) -> int:
    """`lockstep golden explain`."""
    topics = ", ".join(EXPLAIN_TOPICS)
    parser = VerbParser("golden explain", "A small experiment, printed step by step.")
    parser.add_argument("topic", help=f"one of {topics}")
    args = parser.parse(argv)
    if args.topic not in EXPLAIN_TOPICS:
        raise ConfigError("topic", args.topic, one_of(args.topic, EXPLAIN_TOPICS))
    return _explain(args)


def report_main(argv: Sequence[str]) -> int:
    """`lockstep golden report`."""
    parser = VerbParser("golden report", "A record as a Markdown or HTML table.")
    parser.add_argument("record", type=Path, help="record of a run")
    parser.option("out", detail=".md or .html (Markdown to standard output if it is left out)")
    args = parser.parse(argv)
    check_writable("out", args.out)
    return _report(args)


def _add_run_options(parser: VerbParser) -> None:
    parser.option("out", detail="the record as JSON")
    parser.option("report", detail=".md or .html")
    parser.option("smollm2")
    parser.option("commit")


def _run(args: argparse.Namespace) -> int:
    _check_outputs(args)
    from golden.suite import cpu_results

    command = "lockstep golden run"
    return _finish(args, cpu_results(args.smollm2), command, "cpu")


def _gpu(args: argparse.Namespace) -> int:
    _check_outputs(args)
    import torch

    from golden.gpu import GpuPlan, gpu_results

    device, tp = "cpu" if args.device == "cpu" else "cuda", args.tensor_parallel_size
    if device == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count < tp:
            raise ConfigError("tensor_parallel_size", tp, f"there are {count} CUDA devices")
    shapes = tuple(args.shape)
    plan = GpuPlan(device, args.tiny, args.quick, tp, args.smollm2, shapes)
    flags = [name for name in ("tiny", "quick") if getattr(args, name)]
    command = " ".join(["lockstep golden gpu", *(f"--{flag}" for flag in flags)])
    if device != "cuda":
        command += f" --device {device}"
    command += "".join(f" --shape {shape}" for shape in shapes)
    if tp > 1:
        command += f" --tp {tp}"
    return _finish(args, gpu_results(plan), command, device)


def _check_outputs(args: argparse.Namespace) -> None:
    """Refuses what could not be written or read, before anything runs."""
    if args.smollm2 is not None and not (args.smollm2 / "config.json").is_file():
        raise InputError(f"{args.smollm2}: holds no config.json")
    check_writable("out", args.out)
    check_writable("report", args.report)
    if args.report is not None:
        _report_writer(args.report)


def _finish(args: argparse.Namespace, results: Iterable[object], command: str, device: str) -> int:
    import torch

    from golden.case_table import summary_lines
    from golden.record import make_record, write_record
    from golden.reference import quiet_transformers
    from golden.results import CaseResult

    quiet_transformers()
    started = time.perf_counter()
    rows: list[CaseResult] = []

    def record(complete: bool) -> dict[str, object]:
        seconds = time.perf_counter() - started
        place = torch.device(device)
        return make_record(rows, command, place, args.commit, seconds, complete)

    for row in results:
        assert isinstance(row, CaseResult)
        rows.append(row)
        print(_progress(row), flush=True)
        # A run that is cut short leaves what it had.
        if args.out is not None and len(rows) % 20 == 0:
            write_record(record(complete=False), args.out)
    final = record(complete=True)
    if args.out is not None:
        write_record(final, args.out)
    if args.report is not None:
        write_text(args.report, _report_writer(args.report)(final))
    print("\n".join(summary_lines(final)))
    return 1 if final["failure"] else 0


def _progress(row: object) -> str:
    from golden.results import CaseResult

    assert isinstance(row, CaseResult)
    line = f"{row.status:5} {row.group}: {row.name}"
    if row.stats is not None:
        line += f"  c {row.stats.observed_c:.2f}  KL {row.stats.kl_mean:.1e}"
        line += f"  agreement {row.stats.agreement:.2%}"
    if not row.ok:
        line += f"\n      {row.detail}"
    return line


def _explain(args: argparse.Namespace) -> int:
    from importlib import import_module

    module = import_module(f"golden.explain.{args.topic.replace('-', '_')}")
    for line in module.explain():
        print(line)
    return 0


def _report(args: argparse.Namespace) -> int:
    from golden.case_table import to_markdown
    from golden.record import read_record

    record = read_record(args.record)
    if args.out is None:
        print(to_markdown(record), end="")
    else:
        write_text(args.out, _report_writer(args.out)(record))
    return 0


def _report_writer(path: Path) -> Callable[[Mapping[str, Any]], str]:
    from golden.case_table import to_html, to_markdown

    writers = {".md": to_markdown, ".html": to_html}
    if path.suffix not in writers:
        raise ConfigError("report", str(path), "must end in .md or .html")
    return writers[path.suffix]
