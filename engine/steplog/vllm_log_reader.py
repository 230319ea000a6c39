"""Reads the log of a recording vLLM as a `Recording`; one that was cut short too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from engine.core.errors import ConfigError, InputError
from engine.steplog.files import read_lines
from engine.steplog.vllm_log import FORMAT_NAME, FORMAT_VERSION
from engine.steplog.vllm_run import (
    Pairs,
    Positive,
    RecordedRequest,
    RecordedStep,
    RecordedUpdate,
    Recording,
)


class _Ended(NamedTuple):
    request: int
    reason: str
    outputs: int
    blocks: list[int]


class _Added(msgspec.Struct, tag="a", array_like=True):
    time: int
    request: int
    prompt_tokens: Positive
    max_tokens: int
    sent: int
    blocks: list[int]
    priority: int


class _Scheduled(msgspec.Struct, tag="s", array_like=True):
    start: int
    end: int
    entries: Pairs
    admitted: Pairs
    preempted: list[int]
    running: int
    waiting: int
    free: int


class _Repeated(msgspec.Struct, tag="d", array_like=True):
    start: int
    end: int
    running: int
    waiting: int
    free: int


class _Updated(msgspec.Struct, tag="u", array_like=True):
    start: int
    end: int
    step: int
    ended: list[_Ended]


class _GivenUp(msgspec.Struct, tag="x", array_like=True):
    time: int
    ended: list[_Ended]


class _Client(msgspec.Struct, tag="c", array_like=True):
    request: int
    sent: int
    first_token: int
    gaps: tuple[int, ...]


class _End(msgspec.Struct, tag="e", array_like=True):
    time: int


_Row = _Added | _Scheduled | _Repeated | _Updated | _GivenUp | _Client | _End


def is_vllm_log(first_line: bytes) -> bool:
    """Whether a file that begins with this line is such a log."""
    return FORMAT_NAME.encode() in first_line[:200]


def read_vllm_log(path: Path) -> Recording:
    """The run as far as the file goes; what was still in flight at a kill is left out.

    Raises:
        InputError: another version, or a line that is not of this format; it names the line.
    """
    lines = _lines(path)
    header = _parsed(path, *next(lines))
    if not isinstance(header, dict) or header.get("version") != FORMAT_VERSION:
        raise InputError(f"{path}:1: not version {FORMAT_VERSION} of a {FORMAT_NAME}")
    run, decoder = _Run(), msgspec.json.Decoder(_Row)
    for number, text in lines:
        try:
            run.take(decoder.decode(text))
        except msgspec.ValidationError as error:
            raise InputError(f"{path}:{number}: not a line of a vLLM log ({error})") from None
        except msgspec.DecodeError as error:
            raise InputError(f"{path}:{number}: not JSON ({error})") from None
        except (ValueError, KeyError) as error:
            raise InputError(f"{path}:{number}: not a line of a vLLM log ({error!r})") from None
    recording = run.recording(path, header["config"])
    try:
        _ = recording.kernel
    except (ConfigError, KeyError) as error:
        raise InputError(f"{path}:1: config: {error}") from None
    if not recording.steps:
        raise InputError(f"{path}: holds no step whose result was booked")
    return recording


def rows_of_log(path: Path) -> Iterator[Any]:
    """The lines as plain values."""
    for number, text in _lines(path):
        yield _parsed(path, number, text)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbers and texts; a last line that was cut short is passed over."""
    pending: tuple[int, bytes] | None = None
    for number, text in enumerate(read_lines(path), start=1):
        if pending is not None:
            yield pending
        pending = (number, text)
    if pending is None or (pending[0] > 1 and not _is_whole(pending[1])):
        return
    yield pending


def _is_whole(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except msgspec.DecodeError:
        return False
    return True


def _parsed(path: Path, number: int, text: bytes) -> Any:  # noqa: ANN401
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        what = f"not a {FORMAT_NAME}" if number == 1 else "not JSON"
        raise InputError(f"{path}:{number}: {what} ({error})") from None


class _Run:
    """What the lines so far said."""

    def __init__(self) -> None:
        self._added: dict[int, _Added] = {}
        self._ended: dict[int, tuple[int, _Ended]] = {}
        self._steps: list[list[Any]] = []
        self._updates: list[RecordedUpdate] = []
        self._aborts: list[tuple[int, int]] = []
        self._clients: dict[int, _Client] = {}
        self._rows: list[list[int]] = []

    def take(self, row: _Row) -> None:
        """Takes in one line."""
        if isinstance(row, _Repeated):
            counts = (row.running, row.waiting, row.free)
            self._step(row.start, row.end, self._rows, [], [], counts)
        elif isinstance(row, _Updated):
            if row.step != len(self._updates):
                raise ValueError(f"update of step {row.step}, not of {len(self._updates)}")
            ids = [item.request for item in row.ended]
            self._updates.append(RecordedUpdate(row.step, row.start, row.end, ids))
            self._ended |= {item.request: (row.end, item) for item in row.ended}
        elif isinstance(row, _Scheduled):
            counts = (row.running, row.waiting, row.free)
            self._step(row.start, row.end, row.entries, row.admitted, row.preempted, counts)
        elif isinstance(row, _Added):
            self._added[row.request] = row
        elif isinstance(row, _GivenUp):
            for item in row.ended:
                self._ended[item.request] = (row.time, item._replace(reason="abort"))
                self._aborts.append((row.time, item.request))
        elif isinstance(row, _Client):
            self._clients[row.request] = row

    def _step(
        self,
        start: int,
        end: int,
        entries: list[list[int]],
        admitted: list[list[int]],
        preempted: list[int],
        counts: tuple[int, int, int],
    ) -> None:
        self._rows = [[number, 1] for number, _ in entries]
        self._steps.append([start, end, entries, admitted, [], preempted, *counts])

    def recording(self, path: Path, config: dict[str, Any]) -> Recording:
        """The run up to the last booked result."""
        steps = [
            RecordedStep(start, end, max(end, update.start_us), *rest)
            for (start, end, *rest), update in zip(self._steps, self._updates, strict=False)
        ]
        first_token_us = self._first_tokens(steps)
        last_us = self._updates[-1].end_us if self._updates else 0
        requests = [
            self._request(row, first_token_us.get(number, last_us), last_us)
            for number, row in self._added.items()
            if row.time <= last_us
        ]
        return Recording(
            path,
            path.stem,
            config,
            tuple(requests),
            tuple(steps),
            tuple(self._updates),
            tuple(self._aborts),
        )

    def _first_tokens(self, steps: list[RecordedStep]) -> dict[int, int]:
        """When the step was booked that computed the last token of each prompt."""
        found: dict[int, int] = {}
        computed: dict[int, int] = {}
        for step, update in zip(steps, self._updates, strict=True):
            computed.update({number: hits for number, hits in step.admitted})
            for number, count in step.entries:
                computed[number] += count
                if number not in found and computed[number] >= self._added[number].prompt_tokens:
                    found[number] = update.end_us
        return found

    def _request(self, row: _Added, first_token_us: int, last_us: int) -> RecordedRequest:
        unfinished = (last_us, _Ended(row.request, "", row.max_tokens, row.blocks))
        finish_us, ended = self._ended.get(row.request, unfinished)
        first_token_us, sent_us = min(first_token_us, finish_us), row.sent
        client = self._clients.get(row.request)
        if client is not None:
            sent_us, first_token_us = client.sent, client.first_token
            finish_us = first_token_us + sum(client.gaps)
        return RecordedRequest(
            id=row.request,
            arrival_us=min(sent_us, row.time),
            added_us=row.time,
            first_token_us=first_token_us,
            finish_us=finish_us,
            prompt_tokens=row.prompt_tokens,
            output_tokens=max(1, ended.outputs),
            prefix_group=None,
            sent_us=None if client is None else client.sent,
            token_gaps_us=None if client is None else client.gaps,
            max_tokens=row.max_tokens,
            reason=ended.reason,
            blocks=tuple(ended.blocks or row.blocks),
            priority=row.priority,
        )
