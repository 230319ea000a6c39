"""Recordings of vLLM runs as step logs.

A recording is one JSON object, gzipped or not, with `config`, `requests` and `steps`, and of an
asynchronous run `updates`; the fields and how to record a run of one's own are in
docs/fidelity.md. All its times are integer microseconds of one clock; step logs hold nanoseconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from engine.core.request import Request
from engine.core.tokens import Prompt
from engine.steplog.api import (
    AbortRecord,
    AddRecord,
    ExpandedRecord,
    LogHeader,
    Record,
    StepLogReader,
)
from engine.steplog.files import read_lines
from engine.steplog.vllm_log_reader import is_vllm_log, read_vllm_log
from engine.steplog.vllm_run import NS_PER_US, Progress, Recording
from engine.steplog.vllm_run_reader import read_recording

# What a recording does not hold.
_OMITS = ("blocks", "hit_kinds", "preempted_order")


def is_recording(path: str | os.PathLike[str]) -> bool:
    """Whether the file looks like a recording: one JSON object over one or more lines, no log."""
    first = next(read_lines(Path(path)), b"")[:4096].lstrip()
    return first.startswith(b"{") and b'"type":"header"' not in first.replace(b" ", b"")


class ImportedLog:
    """A recording in the form of a step log; reads like a `StepLogReader`."""

    def __init__(self, recording: Recording) -> None:
        self.path = recording.path
        self.recording = recording
        config = recording.config
        model = {"name": config["model"]} if "model" in config else {}
        for key in ("dtype", "tensor_parallel_size"):
            if key in config:
                model[key] = config[key]
        gpu = config.get("hardware") or config.get("gpu")
        hardware = {"name": gpu} if gpu else {}
        self.header = LogHeader(
            writer="import",
            kernel=recording.kernel,
            options={"name": recording.name, "engine": config.get("engine", "vllm")},
            model=model,
            hardware=hardware,
            outputs_in_adds=True,
            omits=_OMITS,
        )

    def __iter__(self) -> Iterator[Record]:
        """Adds and steps in the order in which the engine saw them."""
        yield from self.expanded()

    def expanded(self) -> Iterator[ExpandedRecord]:
        """The same: a recording has no stretches."""
        recording = self.recording
        prompts = recording.prompts()
        state = Progress(recording)
        pending = booked = 0
        for number, step in enumerate(recording.steps):
            while pending < len(recording.requests):
                request = recording.requests[pending]
                if request.added_us > step.schedule_start_us:
                    break
                # Requests come in between calls, so what was booked by then is certain.
                booked = _booked_by(recording, booked, number, request.added_us)
                open_plans = number - booked if recording.updates else 0
                yield _add_record(recording, pending, prompts[request.id], open_plans)
                pending += 1
            yield from self._aborts(number, step.schedule_start_us)
            record = state.step_record(number, step)
            if recording.updates:
                booked = _booked_by(recording, booked, number, step.schedule_start_us)
                record = replace(record, open_plans=number - booked)
            yield record

    def _aborts(self, number: int, before_us: int) -> Iterator[ExpandedRecord]:
        """Requests given up since the step before this one was scheduled."""
        recording = self.recording
        after_us = recording.steps[number - 1].schedule_start_us if number else -1
        for time_us, name in recording.aborts:
            if after_us < time_us <= before_us:
                booked = _booked_by(recording, 0, number, time_us)
                yield AbortRecord(name, time_us * NS_PER_US, number - booked)


def _booked_by(recording: Recording, booked: int, scheduled: int, time_us: int) -> int:
    """How many of the `scheduled` steps were booked by then; at least `booked` were."""
    updates = recording.updates
    while updates and booked < scheduled and updates[booked].start_us < time_us:
        booked += 1
    return booked


ReadableLog = StepLogReader | ImportedLog


def open_log(path: str | os.PathLike[str]) -> ReadableLog:
    """A step log, or a recording read as one.

    Raises:
        InputError: neither, another version, or damaged.
    """
    path = Path(path)
    if is_vllm_log(next(read_lines(path), b"")):
        return ImportedLog(read_vllm_log(path))
    if is_recording(path):
        return ImportedLog(read_recording(path))
    return StepLogReader(path)


def _add_record(recording: Recording, serial: int, prompt: Prompt, open_plans: int) -> AddRecord:
    request = recording.requests[serial]
    max_tokens = request.max_tokens or request.output_tokens
    return AddRecord(
        request=Request(
            request.id,
            prompt,
            max_tokens,
            priority=request.priority,
            arrival=request.arrival_us,
        ),
        arrival_ns=request.arrival_us * NS_PER_US,
        added_ns=request.added_us * NS_PER_US,
        outputs=recording.outputs(serial),
        open_plans=open_plans,
    )
