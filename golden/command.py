"""`lockstep golden`: run the suites, on a CPU or a GPU, explain them, and write their reports."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.core.errors import ConfigError, InputError

EXPLAIN_TOPICS = ("prefix-cache", "tensor-parallel", "sampling")


def main(argv: Sequence[str]) -> int:
    """Entry point of the verb."""
    args = _parser().parse_args(argv)
    handler = {"run": _run, "gpu": _gpu, "explain": _explain, "report": _report}[args.verb]
    return handler(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep golden", description="Compare the engine's numbers with HF Transformers."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    run = verbs.add_parser("run", help="every suite in small shapes, on this machine's CPU")
    _add_run_options(run)
    gpu = verbs.add_parser("gpu", help="every suite in 16-bit dtypes and real shapes, on a GPU")
    _add_run_options(gpu)
    gpu.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    gpu.add_argument("--tiny", action="store_true", help="small shapes: a test of the run itself")
    gpu.add_argument("--quick", action="store_true", help="bfloat16 only, and no 8B shape")
    gpu.add_argument("--tp", type=int, default=1, metavar="N", help="also run N ranks (default 1)")
    gpu.add_argument(
        "--shape",
        action="append",
        default=[],
        choices=("qwen3-0.6b", "qwen3-8b"),
        help="only this large shape, and nothing else; may be given twice",
    )
    explain = verbs.add_parser("explain", help="a small experiment, printed step by step")
    explain.add_argument("topic", choices=EXPLAIN_TOPICS)
    report = verbs.add_parser("report", help="a record as a Markdown or HTML table")
    report.add_argument("record", type=Path)
    report.add_argument("--out", type=Path, help=".md or .html (default: Markdown to stdout)")
    return parser


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="write the record to this JSON file")
    parser.add_argument("--report", type=Path, help="write the table to this .md or .html file")
    parser.add_argument(
        "--smollm2", type=Path, metavar="FOLDER", help="SmolLM2 as an HF folder (else unpacked)"
    )
    parser.add_argument("--commit", help="the commit to record, where there is no git")


def _run(args: argparse.Namespace) -> int:
    from golden.suite import cpu_results

    _check_outputs(args)
    command = "lockstep golden run"
    return _finish(args, cpu_results(args.smollm2), command, "cpu")


def _gpu(args: argparse.Namespace) -> int:
    import torch

    from golden.gpu import GpuPlan, gpu_results

    _check_outputs(args)
    if args.tp < 1:
        raise ConfigError("tp", args.tp, "must be at least 1")
    if args.device == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count < args.tp:
            raise ConfigError("tp", args.tp, f"there are {count} CUDA devices")
    shapes = tuple(args.shape)
    plan = GpuPlan(args.device, args.tiny, args.quick, args.tp, args.smollm2, shapes)
    flags = [name for name in ("tiny", "quick") if getattr(args, name)]
    command = " ".join(["lockstep golden gpu", *(f"--{flag}" for flag in flags)])
    if args.device != "cuda":
        command += f" --device {args.device}"
    command += "".join(f" --shape {shape}" for shape in shapes)
    if args.tp > 1:
        command += f" --tp {args.tp}"
    return _finish(args, gpu_results(plan), command, args.device)


def _check_outputs(args: argparse.Namespace) -> None:
    """Refuses what could not be written or read, before anything runs."""
    if args.smollm2 is not None and not (args.smollm2 / "config.json").is_file():
        raise InputError(f"{args.smollm2}: holds no config.json")
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
        args.report.write_text(_report_writer(args.report)(final), encoding="utf-8")
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
        args.out.write_text(_report_writer(args.out)(record), encoding="utf-8")
    return 0


def _report_writer(path: Path) -> Callable[[Mapping[str, Any]], str]:
    from golden.case_table import to_html, to_markdown

    writers = {".md": to_markdown, ".html": to_html}
    if path.suffix not in writers:
        raise ConfigError("report", str(path), "must end in .md or .html")
    return writers[path.suffix]
