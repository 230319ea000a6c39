"""`lockstep sim diff`: the same requests under two configurations, and why their latency differs.

The end-to-end time of a request is cut into five parts that add up to it exactly; the change of
each part has a cause. What a request did while it decoded is read from the step logs: the time in
steps that also carried prompts, and the time in pure decode steps.
"""

from __future__ import annotations

import csv
import json
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.arguments.parser import VerbParser
from engine.core.errors import InputError
from engine.steplog.api import DecodeStretch, StepLogReader, StepRecord
from sim.run.option_table import SIM_TABLE

_NEEDED = ("request_id", "replica", "status", "arrival_ns", "first_scheduled_ns", "first_token_ns",
           "finish_ns", "prompt_tokens", "output_tokens", "hit_tokens", "preemptions",
           "preempted_ns")  # fmt: skip
# Causes by part of the time; `missed_hits` takes the prefill's change where hits differ.
CAUSES: dict[str, str] = {
    "queue": "waited behind others",
    "hits": "missed or gained prefix hits",
    "prefill": "prompt shared its steps",
    "preempted": "waited after preemption",
    "beside_prompts": "decoded beside prompts",
    "batch": "larger or slower decode batches",
    "between": "waited between steps",
}
NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request of a run; times in ns from the run's start."""

    request_id: str
    replica: int
    arrival_ns: int
    first_scheduled_ns: int
    first_token_ns: int
    finish_ns: int
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int
    preemptions: int
    preempted_ns: int

    @property
    def e2e_ns(self) -> int:
        """Arrival to last token."""
        return self.finish_ns - self.arrival_ns


class Clockwork:
    """Busy time of one replica up to any moment, with and without prompts in the step."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._mixed: list[bool] = []
        self._sums: list[tuple[int, int, int]] = [(0, 0, 0)]

    def add(self, start_ns: int, end_ns: int, has_prompts: bool, num_decodes: int) -> None:
        """A step, or a stretch of equal ones."""
        mixed, pure, area = self._sums[-1]
        length = end_ns - start_ns
        self._starts.append(start_ns)
        self._ends.append(end_ns)
        self._mixed.append(has_prompts)
        if has_prompts:
            self._sums.append((mixed + length, pure, area))
        else:
            self._sums.append((mixed, pure + length, area + length * num_decodes))

    def between(self, start_ns: int, end_ns: int) -> tuple[int, int, int]:
        """Time in steps with prompts, in pure decode steps, and batch x time of the latter."""
        a, b = self._until(start_ns), self._until(end_ns)
        return b[0] - a[0], b[1] - a[1], b[2] - a[2]

    def _until(self, time_ns: int) -> tuple[int, int, int]:
        index = bisect_right(self._starts, time_ns)
        mixed, pure, area = self._sums[index]
        over = self._ends[index - 1] - time_ns if index else 0
        if over <= 0:
            return mixed, pure, area
        if self._mixed[index - 1]:
            return mixed - over, pure, area
        before = self._sums[index - 1]
        length = self._ends[index - 1] - self._starts[index - 1]
        return mixed, pure - over, area - (area - before[2]) * over // length


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What a run directory says about its requests."""

    path: Path
    rows: Mapping[str, RequestRow]
    unfinished: Mapping[str, str]
    order: tuple[str, ...]
    replicas: Mapping[int, Clockwork]


@dataclass(frozen=True, slots=True)
class RequestChange:
    """How one request fared; `causes_ns` add up to `e2e_ns`, B minus A."""

    request_id: str
    e2e_ns: int
    ttft_ns: int
    causes_ns: Mapping[str, int]
    batch_a: float
    batch_b: float

    @property
    def main_cause(self) -> str:
        """The cause with the largest part in the direction of the change."""
        sign = 1 if self.e2e_ns > 0 else -1
        return max(self.causes_ns, key=lambda cause: sign * self.causes_ns[cause])


def read_run(path: Path) -> RunFiles:
    """Reads the directory that `lockstep sim run --out` wrote.

    Raises:
        InputError: files are missing or not those of a run.
    """
    table, log = path / "requests.csv", path / "steps.jsonl"
    for file in (table, log):
        if not file.is_file():
            raise InputError(f"{path}: holds no {file.name}: not the output of lockstep sim run")
    rows: dict[str, RequestRow] = {}
    unfinished: dict[str, str] = {}
    order = []
    with table.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        missing = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
        if missing:
            raise InputError(f"{table}: lacks the column {missing[0]}")
        for line, cells in enumerate(reader, start=2):
            name = cells["request_id"]
            order.append(name)
            if cells["status"] != "completed":
                unfinished[name] = cells["status"]
                continue
            try:
                numbers = [int(cells[key]) for key in _NEEDED[3:]]
                rows[name] = RequestRow(name, int(cells["replica"]), *numbers)
            except (TypeError, ValueError):
                raise InputError(f"{table}:{line}: a time or count is not a whole number") from None
    return RunFiles(path, rows, unfinished, tuple(order), _clockworks(log))


def _clockworks(path: Path) -> dict[int, Clockwork]:
    replicas: dict[int, Clockwork] = {}
    for record in StepLogReader(path):
        if isinstance(record, StepRecord):
            end_ns = record.start_ns + record.duration_ns
            clock = replicas.setdefault(record.replica, Clockwork())
            clock.add(record.start_ns, end_ns, bool(record.chunks), len(record.decode_ids))
        elif isinstance(record, DecodeStretch):
            clock = replicas.setdefault(record.replica, Clockwork())
            start_ns = record.start_ns
            for gap_ns, duration_ns in zip(record.gaps_ns, record.durations_ns, strict=True):
                start_ns += gap_ns
                clock.add(start_ns, start_ns + duration_ns, False, len(record.decode_ids))
                start_ns += duration_ns
    return replicas


def compare_runs(a: RunFiles, b: RunFiles) -> list[RequestChange]:
    """Changes of the requests that both runs completed, in the order of the workload.

    Raises:
        InputError: the runs did not serve the same requests.
    """
    if a.order != b.order:
        raise InputError(
            f"{b.path}: not the same requests as {a.path} ({len(b.order)} and {len(a.order)}"
            " requests, or other ids)"
        )
    changes = []
    for name in a.order:
        one, other = a.rows.get(name), b.rows.get(name)
        if one is None or other is None:
            continue
        for field in ("prompt_tokens", "output_tokens"):
            if getattr(one, field) != getattr(other, field):
                raise InputError(
                    f"{b.path}: request {name} has {field}={getattr(other, field)}, in {a.path}"
                    f" {getattr(one, field)}: not the same workload"
                )
        changes.append(_change(one, other, a.replicas, b.replicas))
    return changes


def _change(
    a: RequestRow,
    b: RequestRow,
    clocks_a: Mapping[int, Clockwork],
    clocks_b: Mapping[int, Clockwork],
) -> RequestChange:
    parts_a, batch_a = _parts(a, clocks_a)
    parts_b, batch_b = _parts(b, clocks_b)
    causes = {cause: parts_b[cause] - parts_a[cause] for cause in parts_a}
    causes["hits"] = 0
    if a.hit_tokens != b.hit_tokens:
        causes["hits"], causes["prefill"] = causes["prefill"], 0
    ttft_ns = (b.first_token_ns - b.arrival_ns) - (a.first_token_ns - a.arrival_ns)
    ordered = {cause: causes[cause] for cause in CAUSES}
    return RequestChange(a.request_id, b.e2e_ns - a.e2e_ns, ttft_ns, ordered, batch_a, batch_b)


def _parts(row: RequestRow, clocks: Mapping[int, Clockwork]) -> tuple[dict[str, int], float]:
    """Parts of the end-to-end time in ns, and the mean batch of the pure decode steps.

    A preempted request is counted as waiting while it decodes; what it recomputes afterwards
    counts as time beside prompts.
    """
    clock = clocks.get(row.replica, Clockwork())
    mixed, pure, area = clock.between(row.first_token_ns, row.finish_ns)
    decode_ns = row.finish_ns - row.first_token_ns
    # Steps that ran while the request waited for its second admission are not its own.
    waited = min(row.preempted_ns, decode_ns)
    own_mixed = max(0, mixed - max(0, waited - pure))
    own_pure = max(0, mixed + pure - waited - own_mixed)
    parts = {
        "queue": row.first_scheduled_ns - row.arrival_ns,
        "prefill": row.first_token_ns - row.first_scheduled_ns,
        "preempted": waited,
        "beside_prompts": own_mixed,
        "batch": own_pure,
        "between": decode_ns - waited - own_mixed - own_pure,
    }
    return parts, area / pure if pure else 0.0


# Output -----------------------------------------------------------------------------------------


def diff_document(
    a: RunFiles, b: RunFiles, changes: Sequence[RequestChange], margin_ms: float
) -> dict[str, Any]:
    """The comparison as JSON data: totals per cause, then every request."""
    margin_ns = margin_ms * NS_PER_MS
    gained = [change for change in changes if change.e2e_ns < -margin_ns]
    lost = [change for change in changes if change.e2e_ns > margin_ns]
    return {
        "compared": len(changes),
        "only_in_a": [name for name in a.order if name in a.rows and name not in b.rows],
        "only_in_b": [name for name in b.order if name in b.rows and name not in a.rows],
        "margin_ms": margin_ms,
        "gained": len(gained),
        "lost": len(lost),
        "same": len(changes) - len(gained) - len(lost),
        "total_e2el_ms": sum(change.e2e_ns for change in changes) / NS_PER_MS,
        "total_ttft_ms": sum(change.ttft_ns for change in changes) / NS_PER_MS,
        "causes": {
            cause: {
                "meaning": meaning,
                "total_ms": sum(c.causes_ns[cause] for c in changes) / NS_PER_MS,
                "gained_by_it": sum(c.main_cause == cause for c in gained),
                "lost_by_it": sum(c.main_cause == cause for c in lost),
            }
            for cause, meaning in CAUSES.items()
        },
        "requests": [_request_document(change) for change in changes],
    }


def _request_document(change: RequestChange) -> dict[str, Any]:
    return {
        "request_id": change.request_id,
        "e2el_ms": change.e2e_ns / NS_PER_MS,
        "ttft_ms": change.ttft_ns / NS_PER_MS,
        "main_cause": change.main_cause if change.e2e_ns else None,
        "causes_ms": {cause: time / NS_PER_MS for cause, time in change.causes_ns.items()},
        "mean_decode_batch": [change.batch_a, change.batch_b],
    }


def main(argv: Sequence[str]) -> int:
    """Compares two run directories; returns 0 whatever the difference is.

    Raises:
        ConfigError, InputError: a directory is no run, or the runs are of different requests.
    """
    parser = VerbParser(
        "sim diff",
        "Which requests gained or lost between two runs of one workload, and why.",
        SIM_TABLE,
    )
    parser.add_argument("run_a", type=Path, metavar="RUN_A", help="directory of sim run --out")
    parser.add_argument("run_b", type=Path, metavar="RUN_B", help="the other one")
    parser.option("top", 5)
    parser.option("margin_ms", 1.0)
    parser.option("json", detail="with every request")
    arguments = parser.parse(argv)
    a, b = read_run(arguments.run_a), read_run(arguments.run_b)
    changes = compare_runs(a, b)
    document = diff_document(a, b, changes, arguments.margin_ms)
    if arguments.json:
        json.dump(document, sys.stdout, indent=1, allow_nan=False)
        print()
    else:
        print(_text(document, changes, arguments.top))
    return 0


def _text(document: Mapping[str, Any], changes: Sequence[RequestChange], top: int) -> str:
    lines = [
        f"{document['compared']:,} requests in both runs: {document['gained']:,} gained,"
        f" {document['lost']:,} lost, {document['same']:,} within {document['margin_ms']:g} ms"
    ]
    for side in ("a", "b"):
        if document[f"only_in_{side}"]:
            lines.append(f"completed in {side.upper()} only: {len(document[f'only_in_{side}']):,}")
    lines.append(f"{'cause':<34}{'total s':>10}{'gained':>8}{'lost':>8}")
    for cause in document["causes"].values():
        lines.append(
            f"{cause['meaning']:<34}{cause['total_ms'] / 1e3:>+10.3f}"
            f"{cause['gained_by_it']:>8,}{cause['lost_by_it']:>8,}"
        )
    lines.append(f"{'end-to-end time, B - A':<34}{document['total_e2el_ms'] / 1e3:>+10.3f}")
    ordered = sorted(changes, key=lambda change: change.e2e_ns)
    for title, chosen in (("gained most", ordered[:top]), ("lost most", ordered[::-1][:top])):
        shown = [c for c in chosen if (c.e2e_ns < 0) == (title == "gained most") and c.e2e_ns]
        if shown:
            lines.append(title)
            lines += [_line(change) for change in shown]
    return "\n".join(lines)


def _line(change: RequestChange) -> str:
    cause = change.main_cause
    text = (
        f"  {change.request_id}: {change.e2e_ns / NS_PER_MS:+.1f} ms, mostly {CAUSES[cause]}"
        f" ({change.causes_ns[cause] / NS_PER_MS:+.1f} ms)"
    )
    if cause == "batch":
        text += f", mean batch {change.batch_a:.1f} -> {change.batch_b:.1f}"
    return text
