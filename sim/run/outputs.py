"""The output directory of a run: complete under its name, or not there at all."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from engine.core import ConfigError, InputError
from engine.steplog.api import StepLogReader
from engine.steplog.perfetto import write_trace
from sim.metrics.requests import COMPLETED, STATUS_NAMES, UNSET
from sim.metrics.summary import NS_PER_MS
from sim.report.run_report import render_report
from sim.run.run import Run

STEP_LOG = "steps.jsonl"
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


class OutputDirectory:
    """Collects files beside the target and renames the whole at the end.

    Use as a context: an error inside removes what was written. An older run under the same name
    is replaced; any other directory that is not empty is refused.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        if target.exists() and not target.is_dir():
            raise ConfigError("out", str(target), "exists and is not a directory")
        if target.is_dir() and any(target.iterdir()) and not (target / SUMMARY).is_file():
            raise ConfigError("out", str(target), "is a directory that holds no earlier run")
        self.path = target.with_name(f".{target.name}.{os.getpid()}.partial")
        self._new_parents = [parent for parent in target.parents if not parent.exists()]

    def __enter__(self) -> OutputDirectory:
        try:
            self.path.mkdir(parents=True)
        except OSError as error:
            raise InputError(f"{self.target}: cannot be written ({error.strerror})") from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            for parent in self._new_parents:  # deepest first
                with suppress(OSError):
                    parent.rmdir()
            return
        old = self.target.with_name(f".{self.target.name}.{os.getpid()}.old")
        if self.target.exists():
            self.target.rename(old)
        self.path.rename(self.target)
        shutil.rmtree(old, ignore_errors=True)


def write_outputs(run: Run, directory: Path, with_trace: bool = True) -> None:
    """Writes all files of a run except the step log, which must already be there."""
    text = json.dumps(run.summary.to_json(), indent=2, allow_nan=False) + "\n"
    (directory / SUMMARY).write_text(text, encoding="utf-8")
    write_requests_csv(run, directory / "requests.csv")
    _write_parquet(run, directory / "requests.parquet")
    report = render_report(run.result, run.summary)
    (directory / "report.html").write_text(report, encoding="utf-8")
    if with_trace:
        write_trace(StepLogReader(directory / STEP_LOG), directory / "trace.json")


def write_requests_csv(run: Run, path: Path) -> None:
    """One row per request, in the workload's order; empty cells are what never happened.

    The file is itself a trace of the plain schema.
    """
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(request_rows(run))


def request_rows(run: Run) -> Iterator[list[Cell]]:
    """Cells of `COLUMNS` for every request."""
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
    columns = dict(zip(COLUMNS, zip(*request_rows(run), strict=True), strict=True))
    columns["request_id"] = tuple(str(name) for name in columns["request_id"])
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return True
