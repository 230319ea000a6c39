"""Reads recordings of vLLM runs and turns them into step logs.

A recording is one JSON object, gzipped or not, with `config`, `requests` and `steps`; the fields
and how to record a run of one's own are in docs/fidelity.md. All its times are integer
microseconds of one clock; step logs hold nanoseconds.
"""

from __future__ import annotations

import json
import os
import zlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.config import KernelConfig
from engine.core.errors import ConfigError, InputError
from engine.core.plan import Admission
from engine.core.request import Request
from engine.core.tokens import Prompt
from engine.steplog.api import (
    AddRecord,
    ChunkRecord,
    ExpandedRecord,
    FinishRecord,
    LogHeader,
    Record,
    StepLogReader,
    StepRecord,
)
from engine.steplog.files import read_lines

NS_PER_US = 1000
# Prompts and outputs are ranges of distinct ids; no prompt comes near this length.
_ID_SPAN = 1 << 24
_CONFIG_KEYS = ("num_gpu_blocks", "block_size", "max_num_batched_tokens", "max_num_seqs",
                "max_model_len")  # fmt: skip
# What a recording does not hold.
_OMITS = ("blocks", "hit_kinds", "preempted_order")


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request; `added_us` is when the engine got it, `finish_us` when its last token left."""

    id: int
    arrival_us: int
    added_us: int
    first_token_us: int
    finish_us: int
    prompt_tokens: int
    output_tokens: int
    prefix_group: int | None


class RecordedStep(NamedTuple):
    """One engine step; the last three are counts after scheduling."""

    schedule_start_us: int
    schedule_end_us: int
    forward_done_us: int
    entries: list[list[int]]
    admitted: list[list[int]]
    resumed: list[int]
    preempted: list[int]
    num_running: int
    num_waiting: int
    num_free_blocks: int


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded run; requests are in the order in which the engine got them."""

    path: Path
    name: str
    config: Mapping[str, Any]
    requests: tuple[RecordedRequest, ...]
    steps: tuple[RecordedStep, ...]

    @property
    def kernel(self) -> KernelConfig:
        """The kernel's configuration; vLLM keeps one block of its pool as a placeholder."""
        config = self.config
        return KernelConfig(
            num_blocks=config["num_gpu_blocks"] - 1,
            max_model_len=config["max_model_len"],
            block_size=config["block_size"],
            max_num_seqs=config["max_num_seqs"],
            max_num_batched_tokens=config["max_num_batched_tokens"],
            enable_prefix_caching=config.get("enable_prefix_caching", True),
        )

    def prompts(self) -> dict[int, Prompt]:
        """A prompt for each request: distinct ids, shared ones inside a prefix group.

        A recording does not say how long a group's common prefix is: the most that a first
        admission of the group hit is as good, since hits come in whole blocks.
        """
        shared = self._shared_prefixes()
        prompts = {}
        for serial, request in enumerate(self.requests):
            common = 0
            group = request.prefix_group
            spans: list[range | array[int]] = []
            if group is not None:
                common = min(shared.get(group, 0), request.prompt_tokens)
                first = -(group + 1) * _ID_SPAN
                spans.append(range(first, first + common))
            first = serial * _ID_SPAN
            spans.append(range(first, first + request.prompt_tokens - common))
            prompts[request.id] = Prompt.from_spans(spans)
        return prompts

    def outputs(self, serial: int) -> Prompt:
        """Stand-in output ids of the request at this place."""
        first = serial * _ID_SPAN + _ID_SPAN // 2
        return Prompt(range(first, first + self.requests[serial].output_tokens))

    def _shared_prefixes(self) -> dict[int, int]:
        group_of = {request.id: request.prefix_group for request in self.requests}
        shared: dict[int, int] = {}
        seen: set[int] = set()
        for step in self.steps:
            for request_id, hit_tokens in step.admitted:
                group = group_of[request_id]
                if request_id not in seen and group is not None:
                    shared[group] = max(shared.get(group, 0), hit_tokens)
                seen.add(request_id)
        return shared


def is_recording(path: str | os.PathLike[str]) -> bool:
    """Whether the file looks like a recording: one JSON object over one or more lines, no log."""
    first = next(read_lines(Path(path)), b"")[:4096].lstrip()
    return first.startswith(b"{") and b'"type":"header"' not in first.replace(b" ", b"")


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """Reads and checks a recording.

    Raises:
        InputError: truncated, foreign, or inconsistent; the message names the place.
    """
    path = Path(path)
    try:
        document = json.loads(b"".join(read_lines(path)))
    except (ValueError, RecursionError, zlib.error) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not complete JSON, so no recording ({error})") from None
    if not isinstance(document, dict) or not {"config", "requests", "steps"} <= set(document):
        raise InputError(f"{path}: neither a step log nor a recording with config, requests, steps")
    config = _checked_config(path, document["config"])
    requests = sorted(
        (
            _request(path, row, fields)
            for row, fields in enumerate(_rows(path, document, "requests"))
        ),
        key=lambda request: request.added_us,
    )
    steps = tuple(_step(path, row, item) for row, item in enumerate(_rows(path, document, "steps")))
    recording = Recording(
        path, str(document.get("name", path.stem)), config, tuple(requests), steps
    )
    _check_consistent(recording)
    return recording


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
        hardware = {"name": config["hardware"]} if "hardware" in config else {}
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
        state = _Progress(recording)
        pending = 0
        for number, step in enumerate(recording.steps):
            while pending < len(recording.requests):
                request = recording.requests[pending]
                if request.added_us > step.schedule_start_us:
                    break
                yield _add_record(recording, pending, prompts[request.id])
                pending += 1
            yield state.step_record(number, step)


ReadableLog = StepLogReader | ImportedLog


def open_log(path: str | os.PathLike[str]) -> ReadableLog:
    """A step log, or a recording read as one.

    Raises:
        InputError: neither, another version, or damaged.
    """
    if is_recording(path):
        return ImportedLog(read_recording(path))
    return StepLogReader(path)


class _Progress:
    """How far each request has got, which turns entries into decodes and chunks."""

    def __init__(self, recording: Recording) -> None:
        self._prompt_tokens = {request.id: request.prompt_tokens for request in recording.requests}
        self._total = {
            request.id: request.prompt_tokens + request.output_tokens
            for request in recording.requests
        }
        self._computed: dict[int, int] = {}
        # Known tokens: prompt and outputs so far.
        self._known = dict(self._prompt_tokens)

    def step_record(self, number: int, step: RecordedStep) -> StepRecord:
        computed, known = self._computed, self._known
        resumed = set(step.resumed)
        admitted = []
        for request_id, hit_tokens in step.admitted:
            computed[request_id] = hit_tokens
            admitted.append(Admission(request_id, hit_tokens, 0, 0, 0, request_id in resumed))
        decodes: list[tuple[int, int]] = []
        chunks, finished = [], []
        for row, (request_id, num_tokens) in enumerate(step.entries):
            first = computed[request_id]
            computed[request_id] = end = first + num_tokens
            samples = end == known[request_id]
            if samples and num_tokens == 1 and first >= self._prompt_tokens[request_id]:
                decodes.append((request_id, first))
            else:
                chunks.append(ChunkRecord(row, request_id, first, num_tokens, samples))
            if samples:
                known[request_id] += 1
                if known[request_id] == self._total[request_id]:
                    finished.append(FinishRecord(request_id, "length"))
        start_us = step.schedule_start_us
        return StepRecord(
            step=number,
            start_ns=start_us * NS_PER_US,
            duration_ns=(step.forward_done_us - start_us) * NS_PER_US,
            decode_ids=tuple([request_id for request_id, _ in decodes]),
            decode_positions=tuple([first for _, first in decodes]),
            chunks=tuple(chunks),
            preempted=tuple(step.preempted),
            admitted=tuple(admitted),
            num_free_blocks=step.num_free_blocks,
            num_running=step.num_running,
            num_waiting=step.num_waiting,
            finished=tuple(finished),
            # Only the scheduler's own time was recorded.
            host_ns=(step.schedule_end_us - start_us) * NS_PER_US,
        )


def _add_record(recording: Recording, serial: int, prompt: Prompt) -> AddRecord:
    request = recording.requests[serial]
    return AddRecord(
        request=Request(request.id, prompt, request.output_tokens),
        arrival_ns=request.arrival_us * NS_PER_US,
        added_ns=request.added_us * NS_PER_US,
        outputs=recording.outputs(serial),
    )


def _checked_config(path: Path, config: object) -> Mapping[str, Any]:
    if not isinstance(config, dict):
        raise InputError(f"{path}: config is not an object")
    for key in _CONFIG_KEYS:
        if not _is_count(config.get(key)):
            raise InputError(
                f"{path}: config.{key}={config.get(key)!r}: must be a positive integer"
            )
    if config.get("async_scheduling"):
        raise InputError(f"{path}: config.async_scheduling=true: record with it switched off")
    return config


def _rows(path: Path, document: Mapping[str, Any], key: str) -> list[Any]:
    rows = document[key]
    if not isinstance(rows, list) or not rows:
        raise InputError(f"{path}: {key} must be a list that is not empty")
    return rows


def _request(path: Path, row: int, fields: object) -> RecordedRequest:
    names = RecordedRequest.__slots__
    if not isinstance(fields, dict):
        raise InputError(f"{path}: requests[{row}]: not an object")
    values = {name: fields.get(name) for name in names}
    for name, value in values.items():
        if name == "prefix_group" and value is None:
            continue
        if type(value) is not int or value < (1 if name.endswith("_tokens") else 0):
            raise InputError(f"{path}: requests[{row}].{name}={value!r}: must be a whole number")
    request = RecordedRequest(**values)  # type: ignore[arg-type]
    if not request.added_us <= request.first_token_us <= request.finish_us:
        raise InputError(f"{path}: requests[{row}]: its times are not in order")
    if request.prompt_tokens + request.output_tokens >= _ID_SPAN // 2:
        raise InputError(f"{path}: requests[{row}]: too many tokens")
    return request


def _step(path: Path, row: int, item: object) -> RecordedStep:
    if not isinstance(item, list) or len(item) != len(RecordedStep._fields):
        raise InputError(f"{path}: steps[{row}]: must be a list of {len(RecordedStep._fields)}")
    step = RecordedStep(*item)
    counts = [*step[:3], *step[7:]]
    lists = step[3:7]
    if not all(type(value) is int for value in counts) or not all(
        isinstance(value, list) for value in lists
    ):
        raise InputError(f"{path}: steps[{row}]: a field has the wrong type")
    pairs = [*step.entries, *step.admitted]
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise InputError(f"{path}: steps[{row}]: entries and admitted must be pairs")
    if not step.schedule_start_us <= step.schedule_end_us <= step.forward_done_us:
        raise InputError(f"{path}: steps[{row}]: its times are not in order")
    return step


def _check_consistent(recording: Recording) -> None:
    """A recording must tell the whole story of each request, in order."""
    path = recording.path
    try:
        _ = recording.kernel
    except ConfigError as error:
        raise InputError(f"{path}: config: {error}") from None
    added = {request.id: request.added_us for request in recording.requests}
    if len(added) != len(recording.requests):
        raise InputError(f"{path}: two requests have the same id")
    last_end, admitted = -1, set()
    for row, step in enumerate(recording.steps):
        if step.schedule_start_us < last_end:
            raise InputError(f"{path}: steps[{row}]: starts before the step before it ended")
        last_end = step.forward_done_us
        for request_id, _ in step.admitted:
            if added.get(request_id, last_end + 1) > step.schedule_start_us:
                raise InputError(f"{path}: steps[{row}]: request {request_id!r} was not there yet")
            admitted.add(request_id)
        if not {request_id for request_id, _ in step.entries} <= admitted:
            raise InputError(f"{path}: steps[{row}]: an entry was never admitted")
    state = _Progress(recording)
    done = sum(
        len(state.step_record(row, step).finished) for row, step in enumerate(recording.steps)
    )
    if done != len(recording.requests):
        raise InputError(
            f"{path}: {done} of {len(recording.requests)} requests finish in the recorded steps,"
            " so it is truncated"
        )


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0
