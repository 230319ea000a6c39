"""Writes the step log: streaming, atomic, and canonical.

Adjacent pure decode steps of the same rows become one record, whether the writer is fed step by
step or by whole decode runs; both give the same bytes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from engine.core.errors import InputError
from engine.core.plan import Finished, StepOutcome, StepPlan
from engine.core.request import RequestId
from engine.steplog.atomic import AtomicTextFile
from engine.steplog.encode import dump_line, header_to_json, record_to_json
from engine.steplog.events import DecodeRunEvent, StepEvent
from engine.steplog.records import (
    AbortRecord,
    AddRecord,
    DecodeStretch,
    FinishRecord,
    LogHeader,
    Record,
    StepRecord,
    step_of_plan,
)
from engine.steplog.stretch import StretchBuilder, is_plain_decode


class StepLogWriter:
    """Writes one log file, `.jsonl` or `.jsonl.gz`.

    The file appears under its name at `close`, complete, or not at all: leaving a `with` block by
    an exception, or `discard_file`, removes what was written.
    """

    def __init__(self, path: str | os.PathLike[str], header: LogHeader) -> None:
        self.header = header
        if not os.fspath(path).endswith((".jsonl", ".jsonl.gz")):
            raise InputError(f"{path}: a step log's name ends with .jsonl or .jsonl.gz")
        self._file = AtomicTextFile(Path(path))
        self._replicas = [_Replica() for _ in range(header.num_replicas)]
        self._write_line(dump_line(header_to_json(header)))

    def add(self, record: AddRecord) -> None:
        """Logs a request that the kernel accepted.

        Its `open_plans` is the number of plans that were scheduled but not yet passed to `step`.
        """
        if self.header.outputs_in_adds and record.outputs is None:
            name = record.request.request_id
            raise ValueError(f"request {name!r}: this log wants outputs in adds")
        self._hold(record)

    def abort(
        self, request_id: RequestId, time_ns: int, *, open_plans: int = 0, replica: int = 0
    ) -> None:
        """Logs an abort; `open_plans` as in `add`."""
        self._hold(AbortRecord(request_id, time_ns, open_plans, replica))

    def step(self, event: StepEvent) -> None:
        """Logs a step after its commit."""
        state, plan, outcome = self._replicas[event.replica], event.plan, event.outcome
        key = (event.graph_bucket, event.open_plans, event.host_ns is None, event.device_ns is None)
        pending = state.pending
        if pending is None or not pending.extends(plan, outcome, key):
            self._flush(state)
            if not is_plain_decode(plan, outcome):
                self._write_record(self._step_record(event))
                self._after_steps(state, 1)
                return
            pending = state.pending = StretchBuilder(plan, event.start_ns, key, event.replica)
        pending.append(plan, event.start_ns, event.duration_ns, event.host_ns, event.device_ns)
        if not self.header.outputs_in_adds:
            pending.columns.append(outcome.token_ids)
        self._end_steps(state, pending, outcome, 1)

    def decode_run(self, event: DecodeRunEvent) -> None:
        """Logs a decode run; its tokens may be left out if the log keeps outputs in adds."""
        plan, run, start_ns, durations_ns = (
            event.plan,
            event.run,
            event.start_ns,
            event.durations_ns,
        )
        bucket, replica = event.graph_bucket, event.replica
        if run.num_steps == 1:
            times = (start_ns, durations_ns[0])
            self.step(StepEvent(plan, run.outcome, *times, 0, replica, graph_bucket=bucket))
            return
        state = self._replicas[replica]
        key = (bucket, 0, True, True)
        pending = state.pending
        if pending is None or not pending.follows(plan, key):
            self._flush(state)
            pending = state.pending = StretchBuilder(plan, start_ns, key, replica)
        pending.append_run(plan, run, start_ns, durations_ns)
        if not self.header.outputs_in_adds:
            if event.tokens is None:
                raise ValueError("this log wants the sampled tokens of each row")
            pending.end_columns()
            pending.segments.append(event.tokens)
        self._end_steps(state, pending, run.outcome, run.num_steps)

    def discarded(
        self,
        plan: StepPlan,
        failed: Iterable[Finished],
        start_ns: int,
        duration_ns: int,
        *,
        open_plans: int = 0,
        replica: int = 0,
    ) -> None:
        """Logs a step that failed and was undone."""
        state = self._replicas[replica]
        self._flush(state)
        outcome = StepOutcome(plan.step, (), (), tuple(failed))
        event = StepEvent(plan, outcome, start_ns, duration_ns, open_plans, replica)
        self._write_record(self._step_record(event, True))
        self._after_steps(state, 1)

    def write(self, record: Record) -> None:
        """Logs a record as it is, without merging; for converters and filters."""
        state = self._replicas[record.replica]
        self._flush(state)
        self._write_record(record)
        if isinstance(record, DecodeStretch):
            state.num_steps += record.num_steps
        elif isinstance(record, StepRecord):
            state.num_steps += 1

    def drop_held(self) -> None:
        """Forgets adds and aborts that stand behind steps which will never be logged."""
        for state in self._replicas:
            state.held.clear()

    def close(self) -> None:
        """Completes the file and gives it its name."""
        for state in self._replicas:
            self._flush(state)
            for _, record in state.held:
                self._write_record(record)
        self._write_line(dump_line({"type": "end", "records": self._file.lines - 1}))
        self._file.commit()

    def discard_file(self) -> None:
        """Removes what was written so far."""
        self._file.discard()

    def __enter__(self) -> StepLogWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard_file()

    def _hold(self, record: AddRecord | AbortRecord) -> None:
        state = self._replicas[record.replica]
        if record.open_plans:
            # The steps that were scheduled before this event must stand before it in the file.
            state.held.append((state.num_steps + record.open_plans, record))
            return
        self._flush(state)
        self._write_record(record)

    def _end_steps(
        self, state: _Replica, pending: StretchBuilder, outcome: StepOutcome, count: int
    ) -> None:
        if outcome.finished:
            pending.finished = _finishes(outcome.finished)
            self._flush(state)
        self._after_steps(state, count)

    def _after_steps(self, state: _Replica, count: int) -> None:
        state.num_steps += count
        while state.held and state.held[0][0] <= state.num_steps:
            self._flush(state)
            self._write_record(state.held.popleft()[1])

    def _flush(self, state: _Replica) -> None:
        pending, state.pending = state.pending, None
        if pending is not None:
            self._write_record(pending.record(not self.header.outputs_in_adds))

    def _step_record(self, event: StepEvent, discarded: bool = False) -> StepRecord:
        plan, outcome = event.plan, event.outcome
        sampled = tuple(outcome.sampled)
        return replace(
            step_of_plan(plan, event.start_ns, event.duration_ns),
            token_ids=None
            if self.header.outputs_in_adds or discarded
            else tuple(outcome.token_ids),
            sampled=None if sampled == tuple(plan.sampled_ids) else sampled,
            finished=_finishes(outcome.finished),
            discarded=discarded,
            host_ns=event.host_ns,
            device_ns=event.device_ns,
            graph_bucket=event.graph_bucket,
            open_plans=event.open_plans,
            replica=event.replica,
        )

    def _write_record(self, record: Record) -> None:
        self._write_line(dump_line(record_to_json(record)))

    def _write_line(self, line: str) -> None:
        self._file.write_line(line)


class _Replica:
    """What the writer remembers about one kernel."""

    __slots__ = ("held", "num_steps", "pending")

    def __init__(self) -> None:
        self.pending: StretchBuilder | None = None
        self.num_steps = 0
        self.held: deque[tuple[int, AddRecord | AbortRecord]] = deque()


def _finishes(finished: Iterable[Finished]) -> tuple[FinishRecord, ...]:
    return tuple([FinishRecord(end.request_id, end.reason) for end in finished])
