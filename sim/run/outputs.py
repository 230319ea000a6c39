"""The files of a run, and the folder that takes them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

from engine.steplog.api import StepLogReader
from engine.steplog.atomic import write_text
from engine.steplog.log_folder import STEP_LOG_NAME
from engine.steplog.output_folder import OutputFolder, read_head, read_json
from engine.steplog.perfetto import TRACE_BEGIN, write_trace
from sim.metrics.requests import COMPLETED, STATUS_NAMES, UNSET
from sim.metrics.summary import NS_PER_MS
from sim.report.page import is_page
from sim.report.run_report import render_report
from sim.run.run import Run

SUMMARY = "summary.json"
COLUMNS = (
    "request_id",
    "replica",
    "status",
    "arrival_ns",
    "first_scheduled_ns",
    "first_token_ns",
    "finish_ns",
    "prompt_tokens",
    "output_tokens",
    "hit_tokens",
    "preemptions",
    "preempted_ns",
    "queue_ms",
    "ttft_ms",
    "tpot_ms",
    "e2el_ms",
)
Cell = int | float | str | None


def run_folder(out: Path) -> OutputFolder:
    """The folder of a run's results; those of an earlier run are replaced, and nothing else."""
    known = {
        SUMMARY: _is_summary,
        "requests.csv": _is_request_table,
        "requests.parquet": _is_parquet,
        STEP_LOG_NAME: _is_step_log,
        "trace.json": _is_trace,
        "report.html": is_page,
    }
    return OutputFolder(out, known, last=SUMMARY)


def _is_summary(path: Path) -> bool:
    document = read_json(path)
    ours = document.get("sim") if isinstance(document, dict) else None
    return isinstance(ours, dict) and "provenance" in ours


def _is_request_table(path: Path) -> bool:
    return read_head(path).startswith(b"request_id,replica,status,arrival_ns,")


def _is_step_log(path: Path) -> bool:
    head = read_head(path)
    return b'"format":"lockstep-steplog"' in head and b'"writer":"sim"' in head


def _is_trace(path: Path) -> bool:
    return read_head(path).startswith(TRACE_BEGIN.encode() + b"\n")


def _is_parquet(path: Path) -> bool:
    # The names of the columns stand in the footer.
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 16)))
        tail = file.read()
    return tail.endswith(b"PAR1") and b"first_scheduled_ns" in tail


def write_outputs(run: Run, directory: Path, with_trace: bool = True, command: str = "") -> None:
    """Writes all files of a run except the step log, which must already be there.

    `command` is the one that repeats the run.
    """
    text = json.dumps(run.summary.to_json(), indent=2, allow_nan=False) + "\n"
    write_text(directory / SUMMARY, text)
    write_requests_csv(run, directory / "requests.csv")
    _write_parquet(run, directory / "requests.parquet")
    report = render_report(run.result, run.summary, command)
    write_text(directory / "report.html", report)
    if with_trace:
        write_trace(StepLogReader(directory / STEP_LOG_NAME), directory / "trace.json")


def write_requests_csv(run: Run, path: Path) -> None:
    """One row per request, in the workload's order; empty cells are what never happened.

    The file is itself a trace of the plain schema.
    """
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns_of(run))
        writer.writerows(request_rows(run))


def columns_of(run: Run) -> tuple[str, ...]:
    """The columns of a run's requests: priorities only where the workload has some."""
    return COLUMNS if run.result.workload.priorities is None else (*COLUMNS, "priority")


def request_rows(run: Run) -> Iterator[list[Cell]]:
    """Cells of `columns_of` for every request."""
    ledger, workload = run.result.ledger, run.result.workload
    for row, status in enumerate(ledger.status):
        arrival = ledger.arrival_ns[row]
        first, finish = ledger.first_token_ns[row], ledger.finish_ns[row]
        scheduled = ledger.first_scheduled_ns[row]
        num_outputs = workload.output_tokens[row]
        latencies: list[Cell] = [None] * 4
        if status == COMPLETED:
            latencies = [(moment - arrival) / NS_PER_MS for moment in (scheduled, first)]
            gaps = (finish - first) / NS_PER_MS
            latencies.append(gaps / (num_outputs - 1) if num_outputs > 1 else None)
            latencies.append((finish - arrival) / NS_PER_MS)
        times = (arrival, scheduled, first, finish)
        yield [
            workload.request_id(row),
            _or_none(ledger.replica[row]),
            STATUS_NAMES[status],
            *(_or_none(time) for time in times),
            workload.prompt_tokens[row],
            num_outputs,
            ledger.hit_tokens[row],
            ledger.preemptions[row],
            ledger.preempted_ns[row],
            *latencies,
            *((workload.priority(row),) if workload.priorities is not None else ()),
        ]


def _or_none(value: int) -> int | None:
    return None if value == UNSET else value


def _write_parquet(run: Run, path: Path) -> bool:
    """Writes the same table as Parquet where pyarrow is installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        return False
    columns = dict(zip(columns_of(run), zip(*request_rows(run), strict=True), strict=True))
    columns["request_id"] = tuple(str(name) for name in columns["request_id"])
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return True
