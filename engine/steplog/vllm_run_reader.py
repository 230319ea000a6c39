"""Reads recordings of vLLM runs and checks that they tell the whole story of each request."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.core.errors import ConfigError, InputError
from engine.steplog.files import read_lines
from engine.steplog.vllm_run import (
    ID_SPAN,
    Progress,
    RecordedRequest,
    RecordedStep,
    RecordedUpdate,
    Recording,
)

# Of the fields of a RecordedRequest, those that such a recording has.
_REQUEST_FIELDS = RecordedRequest.__slots__[: RecordedRequest.__slots__.index("max_tokens")]
_CONFIG_KEYS = ("num_gpu_blocks", "block_size", "max_num_batched_tokens", "max_num_seqs",
                "max_model_len")  # fmt: skip


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
    updates = _updates(path, document) if config.get("async_scheduling") else ()
    rows = _rows(path, document, "steps")
    if updates:
        rows = _with_results(path, rows, updates)
    steps = tuple(_step(path, row, item) for row, item in enumerate(rows))
    recording = Recording(
        path, str(document.get("name", path.stem)), config, tuple(requests), steps, updates
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


def _updates(path: Path, document: Mapping[str, Any]) -> tuple[RecordedUpdate, ...]:
    """The updates of an asynchronous run, which must be one per step, in order."""
    if "updates" not in document:
        raise InputError(f"{path}: config.async_scheduling=true: needs updates beside steps")
    updates: list[RecordedUpdate] = []
    for row, item in enumerate(_rows(path, document, "updates")):
        if not isinstance(item, list) or len(item) != len(RecordedUpdate._fields):
            raise InputError(f"{path}: updates[{row}]: must be a list of 4")
        update = RecordedUpdate(*item)
        if not all(type(value) is int for value in item[:3]) or not isinstance(item[3], list):
            raise InputError(f"{path}: updates[{row}]: a field has the wrong type")
        if update.step != row:
            raise InputError(f"{path}: updates[{row}]: is of step {update.step}, not of {row}")
        if update.end_us < update.start_us or (updates and update.start_us < updates[-1].end_us):
            raise InputError(f"{path}: updates[{row}]: its times are not in order")
        updates.append(update)
    return tuple(updates)


def _with_results(
    path: Path, rows: list[Any], updates: tuple[RecordedUpdate, ...]
) -> list[list[Any]]:
    """The steps of an asynchronous run in the columns of a synchronous one."""
    if len(rows) != len(updates):
        raise InputError(
            f"{path}: {len(rows)} steps and {len(updates)} updates, so it is truncated"
        )
    found = []
    for row, (step, update) in enumerate(zip(rows, updates, strict=True)):
        if not isinstance(step, list) or len(step) != len(RecordedStep._fields) - 2:
            raise InputError(f"{path}: steps[{row}]: must be a list of 8")
        start, end, entries, admitted, preempted, *counts = step
        found.append([start, end, update.start_us, entries, admitted, [], preempted, *counts])
    return found


def _rows(path: Path, document: Mapping[str, Any], key: str) -> list[Any]:
    rows = document[key]
    if not isinstance(rows, list) or not rows:
        raise InputError(f"{path}: {key} must be a list that is not empty")
    return rows


def _request(path: Path, row: int, fields: object) -> RecordedRequest:
    if not isinstance(fields, dict):
        raise InputError(f"{path}: requests[{row}]: not an object")
    values: dict[str, Any] = {name: fields.get(name) for name in _REQUEST_FIELDS}
    gaps = values["token_gaps_us"]
    if gaps is not None:
        if not isinstance(gaps, list) or not all(type(gap) is int and gap >= 0 for gap in gaps):
            raise InputError(f"{path}: requests[{row}].token_gaps_us: must be whole numbers")
        values["token_gaps_us"] = tuple(gaps)
        if values["finish_us"] is None and type(values["first_token_us"]) is int:
            values["finish_us"] = values["first_token_us"] + sum(gaps)
    for name, value in values.items():
        if name in ("prefix_group", "sent_us", "token_gaps_us") and value is None:
            continue
        if name == "token_gaps_us":
            continue
        if type(value) is not int or value < (1 if name.endswith("_tokens") else 0):
            raise InputError(f"{path}: requests[{row}].{name}={value!r}: must be a whole number")
    request = RecordedRequest(**values)
    if not request.added_us <= request.first_token_us <= request.finish_us:
        raise InputError(f"{path}: requests[{row}]: its times are not in order")
    if request.prompt_tokens + request.output_tokens >= ID_SPAN // 2:
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
