"""Converts a step log to a trace that Perfetto and chrome://tracing open.

Each replica is a process: one track of steps (a pure decode stretch is one slice), counters for
requests and free blocks, and one asynchronous track per request with its waiting, prefill and
decode phases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from engine.core.plan import Admission
from engine.core.request import RequestId
from engine.steplog.api import (
    AbortRecord,
    AddRecord,
    DecodeStretch,
    FinishRecord,
    Record,
    StepLogReader,
    StepRecord,
)
from engine.steplog.atomic import AtomicTextFile
from engine.steplog.encode import dump_line

Event = dict[str, object]
_STEPS_THREAD = 0
TRACE_BEGIN = '{"displayTimeUnit":"ms","traceEvents":['


def write_trace(log: StepLogReader, path: Path, every_step: bool = False) -> int:
    """Writes the trace of a log and returns its number of events.

    `every_step` gives each step of a stretch its own slice.
    """
    file = AtomicTextFile(path)
    try:
        file.write_line(TRACE_BEGIN)
        separator = ""
        for event in trace_events(log, every_step):
            file.write_line(separator + dump_line(event))
            separator = ","
        file.write_line("]}")
    except BaseException:
        file.discard()
        raise
    file.commit()
    return file.lines - 2


def trace_events(log: StepLogReader, every_step: bool = False) -> Iterator[Event]:
    """The events, in the order of the log."""
    for replica in range(log.header.num_replicas):
        name = f"{log.header.writer} replica {replica}"
        yield {"ph": "M", "name": "process_name", "pid": replica, "args": {"name": name}}
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": replica,
            "tid": _STEPS_THREAD,
            "args": {"name": "steps"},
        }
    tracks = [_Requests(replica) for replica in range(log.header.num_replicas)]
    records: Iterable[Record] = log.expanded() if every_step else log
    for record in records:
        requests = tracks[record.replica]
        if isinstance(record, AddRecord):
            yield from requests.added(record)
        elif isinstance(record, AbortRecord):
            yield from requests.ended([FinishRecord(record.request_id, "abort")], record.time_ns)
        else:
            yield from _step_events(record)
            yield from requests.stepped(record)


def _step_events(record: StepRecord | DecodeStretch) -> Iterator[Event]:
    place = {"pid": record.replica, "tid": _STEPS_THREAD}
    start_us = record.start_ns / 1000
    if isinstance(record, DecodeStretch):
        first, count, end_ns = record.first_step, record.num_steps, record.end_ns
        name = f"decode x{len(record.decode_ids)}" + (f", {count} steps" if count > 1 else "")
        args: Event = {"first_step": first, "steps": count, "sequences": len(record.decode_ids)}
    else:
        end_ns = record.start_ns + record.duration_ns
        prefill = sum(chunk.num_tokens for chunk in record.chunks)
        parts = [f"prefill {prefill}"] if prefill else []
        parts += [f"decode x{len(record.decode_ids)}"] if record.decode_ids else []
        name = " + ".join(parts) or "empty"
        args = {
            "step": record.step,
            "tokens": record.num_tokens,
            "admitted": [admission.request_id for admission in record.admitted],
            "preempted": list(record.preempted),
        }
    duration_us = (end_ns - record.start_ns) / 1000
    yield {"ph": "X", "name": name, "ts": start_us, "dur": duration_us, "args": args, **place}
    counts = {"running": record.num_running, "waiting": record.num_waiting}
    for title, values in (("requests", counts), ("free blocks", {"free": record.num_free_blocks})):
        yield {"ph": "C", "name": title, "ts": start_us, "pid": record.replica, "args": values}


class _Requests:
    """The phases of one replica's live requests."""

    def __init__(self, replica: int) -> None:
        self._replica = replica
        self._phases: dict[RequestId, str] = {}

    def added(self, record: AddRecord) -> Iterator[Event]:
        request = record.request
        args: Event = {"prompt_tokens": len(request.prompt), "max_tokens": request.max_tokens}
        yield self._event("b", request.request_id, "request", record.arrival_ns, args)
        yield from self._enter(request.request_id, "waiting", record.arrival_ns)

    def stepped(self, record: StepRecord | DecodeStretch) -> Iterator[Event]:
        """A step's admissions and preemptions at its start, first tokens and ends at its end."""
        if isinstance(record, DecodeStretch):
            yield from self.ended(record.finished, record.end_ns)
            return
        for request_id in record.preempted:
            yield self._event("n", request_id, "preempted", record.start_ns)
            yield from self._enter(request_id, "waiting", record.start_ns)
        for admission in record.admitted:
            yield from self._admitted(admission, record.start_ns)
        end_ns = record.start_ns + record.duration_ns
        for chunk in record.chunks:
            if chunk.samples:
                yield from self._enter(chunk.request_id, "decode", end_ns)
        yield from self.ended(record.finished, end_ns)

    def _admitted(self, admission: Admission, time_ns: int) -> Iterator[Event]:
        name = "recompute" if admission.resumed else "prefill"
        args: Event = {"hit_tokens": admission.hit_tokens}
        yield from self._enter(admission.request_id, name, time_ns, args)

    def ended(self, finished: Iterable[FinishRecord], time_ns: int) -> Iterator[Event]:
        """The ends of requests; one that ended before is passed over."""
        for request_id, reason in finished:
            phase = self._phases.pop(request_id, None)
            if phase is not None:
                yield self._event("e", request_id, phase, time_ns)
                yield self._event("e", request_id, "request", time_ns, {"reason": reason})

    def _enter(
        self, request_id: RequestId, phase: str, time_ns: int, args: Event | None = None
    ) -> Iterator[Event]:
        before = self._phases.get(request_id)
        if before is not None:
            yield self._event("e", request_id, before, time_ns)
        self._phases[request_id] = phase
        yield self._event("b", request_id, phase, time_ns, args)

    def _event(
        self, kind: str, request_id: RequestId, name: str, time_ns: int, args: Event | None = None
    ) -> Event:
        event: Event = {"ph": kind, "cat": "request", "name": name, "ts": time_ns / 1000}
        # One id space per replica keeps requests of two replicas apart.
        event["id"] = f"{self._replica}:{request_id}"
        event["pid"] = self._replica
        if args:
            event["args"] = args
        return event
