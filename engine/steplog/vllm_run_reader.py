"""Reads recordings of vLLM runs and checks that they tell the whole story of each request.

Their form is in types that `msgspec` parses into and checks; it says where a value is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from engine.core.errors import ConfigError, InputError
from engine.steplog.files import read_lines
from engine.steplog.vllm_run import (
    ID_SPAN,
    Pairs,
    Positive,
    Progress,
    RecordedRequest,
    RecordedStep,
    RecordedUpdate,
    Recording,
)

_CONFIG_KEYS = ("num_gpu_blocks", "block_size", "max_num_batched_tokens", "max_num_seqs",
                "max_model_len")  # fmt: skip
_Count = Annotated[int, Meta(ge=0)]


class _Request(msgspec.Struct):
    id: _Count
    arrival_us: _Count
    added_us: _Count
    first_token_us: _Count
    prompt_tokens: Positive
    output_tokens: Positive
    finish_us: _Count | None = None
    prefix_group: _Count | None = None
    sent_us: _Count | None = None
    token_gaps_us: tuple[_Count, ...] | None = None


class _Step(NamedTuple):
    """A step of a synchronous run."""

    start_us: int
    end_us: int
    done_us: int
    entries: Pairs
    admitted: Pairs
    resumed: list[int]
    preempted: list[int]
    num_running: int
    num_waiting: int
    num_free_blocks: int


class _AsyncStep(NamedTuple):
    """A step whose result is told by an update of its own."""

    start_us: int
    end_us: int
    entries: Pairs
    admitted: Pairs
    preempted: list[int]
    num_running: int
    num_waiting: int
    num_free_blocks: int


class _Update(NamedTuple):
    step: int
    start_us: int
    end_us: int
    finished: list[int]


class _Document(msgspec.Struct):
    """The form of steps depends on the configuration, so they are parsed after it."""

    config: msgspec.Raw
    requests: msgspec.Raw
    steps: msgspec.Raw
    updates: msgspec.Raw = msgspec.Raw(b"null")
    name: str | None = None


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """Reads and checks a recording.

    Raises:
        InputError: truncated, foreign, or inconsistent; the message names the place.
    """
    path = Path(path)
    data = b"".join(read_lines(path))
    try:
        document = msgspec.json.decode(data, type=_Document)
    except msgspec.ValidationError:
        raise InputError(
            f"{path}: neither a step log nor a recording with config, requests, steps"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not complete JSON, so no recording ({error})") from None
    config = _checked_config(path, msgspec.json.decode(document.config))
    requests = [
        _request(path, row, found)
        for row, found in enumerate(_rows(path, document.requests, "requests", list[_Request]))
    ]
    updates = _updates(path, document) if config.get("async_scheduling") else ()
    recording = Recording(
        path,
        document.name or path.stem,
        config,
        tuple(sorted(requests, key=lambda request: request.added_us)),
        _steps(path, document, updates),
        updates,
    )
    _check_consistent(recording)
    return recording


def _checked_config(path: Path, config: object) -> Mapping[str, Any]:
    if not isinstance(config, dict):
        raise InputError(f"{path}: config is not an object")
    if "num_gpu_blocks" not in config and "num_blocks" in config:
        config = {**config, "num_gpu_blocks": config["num_blocks"]}
    for key in _CONFIG_KEYS:
        if not _is_count(config.get(key)):
            raise InputError(
                f"{path}: config.{key}={config.get(key)!r}: must be a positive integer"
            )
    return config


def _rows(path: Path, data: msgspec.Raw, key: str, kind: type[list[Any]]) -> list[Any]:
    """The rows under a key, in their type."""
    try:
        rows: list[Any] = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        # "Expected `int` - at `$[3].prompt_tokens`"
        what, _, place = str(error).partition(" - at `$")
        raise InputError(f"{path}: {key}{place.rstrip('`')}: {what}") from None
    if not rows:
        raise InputError(f"{path}: {key} must be a list that is not empty")
    return rows


def _updates(path: Path, document: _Document) -> tuple[RecordedUpdate, ...]:
    """The updates of an asynchronous run, which must be one per step, in order."""
    if bytes(document.updates) == b"null":
        raise InputError(f"{path}: config.async_scheduling=true: needs updates beside steps")
    updates: list[RecordedUpdate] = []
    for row, found in enumerate(_rows(path, document.updates, "updates", list[_Update])):
        update = RecordedUpdate(*found)
        if update.step != row:
            raise InputError(f"{path}: updates[{row}]: is of step {update.step}, not of {row}")
        if update.end_us < update.start_us or (updates and update.start_us < updates[-1].end_us):
            raise InputError(f"{path}: updates[{row}]: its times are not in order")
        updates.append(update)
    return tuple(updates)


def _steps(
    path: Path, document: _Document, updates: tuple[RecordedUpdate, ...]
) -> tuple[RecordedStep, ...]:
    """The steps; those of an asynchronous run in the columns of a synchronous one."""
    if not updates:
        steps = [
            RecordedStep(*found) for found in _rows(path, document.steps, "steps", list[_Step])
        ]
    else:
        rows = _rows(path, document.steps, "steps", list[_AsyncStep])
        if len(rows) != len(updates):
            raise InputError(
                f"{path}: {len(rows)} steps and {len(updates)} updates, so it is truncated"
            )
        steps = []
        for found, update in zip(rows, updates, strict=True):
            start, end, entries, admitted, preempted, *counts = found
            steps.append(
                RecordedStep(start, end, update.start_us, entries, admitted, [], preempted, *counts)
            )
    for row, step in enumerate(steps):
        if not step.schedule_start_us <= step.schedule_end_us <= step.forward_done_us:
            raise InputError(f"{path}: steps[{row}]: its times are not in order")
    return tuple(steps)


def _request(path: Path, row: int, found: _Request) -> RecordedRequest:
    finish_us = found.finish_us
    if finish_us is None:
        if found.token_gaps_us is None:
            raise InputError(f"{path}: requests[{row}].finish_us=None: must be a whole number")
        finish_us = found.first_token_us + sum(found.token_gaps_us)
    if not found.added_us <= found.first_token_us <= finish_us:
        raise InputError(f"{path}: requests[{row}]: its times are not in order")
    if found.prompt_tokens + found.output_tokens >= ID_SPAN // 2:
        raise InputError(f"{path}: requests[{row}]: too many tokens")
    return RecordedRequest(**msgspec.structs.asdict(found) | {"finish_us": finish_us})


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
        last_end = step.schedule_end_us if recording.updates else step.forward_done_us
        for request_id, _ in step.admitted:
            if added.get(request_id, step.schedule_start_us + 1) > step.schedule_start_us:
                raise InputError(f"{path}: steps[{row}]: request {request_id!r} was not there yet")
            admitted.add(request_id)
        if not {request_id for request_id, _ in step.entries} <= admitted:
            raise InputError(f"{path}: steps[{row}]: an entry was never admitted")
    state = Progress(recording)
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
