"""Reads the log of a recording vLLM as a `Recording`; one that was cut short too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.core.errors import ConfigError, InputError
from engine.steplog.files import read_lines
from engine.steplog.vllm_log import FORMAT_NAME, FORMAT_VERSION
from engine.steplog.vllm_run import RecordedRequest, RecordedStep, RecordedUpdate, Recording


def is_vllm_log(first_line: bytes) -> bool:
    """Whether a file that begins with this line is such a log."""
    return FORMAT_NAME.encode() in first_line[:200]


def read_vllm_log(path: Path) -> Recording:
    """The run as far as the file goes; what was still in flight at a kill is left out.

    Raises:
        InputError: another version, or a line that is not of this format; it names the line.
    """
    lines = rows_of_log(path)
    header = next(lines)[1]
    if not isinstance(header, dict) or header.get("version") != FORMAT_VERSION:
        raise InputError(f"{path}:1: not version {FORMAT_VERSION} of a {FORMAT_NAME}")
    run = _Run()
    for number, row in lines:
        try:
            run.take(row)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise InputError(f"{path}:{number}: not a line of a vLLM log ({error!r})") from None
    recording = run.recording(path, header["config"])
    try:
        _ = recording.kernel
    except (ConfigError, KeyError) as error:
        raise InputError(f"{path}:1: config: {error}") from None
    if not recording.steps:
        raise InputError(f"{path}: holds no step whose result was booked")
    return recording


def rows_of_log(path: Path) -> Iterator[tuple[int, Any]]:
    """Line numbers and values; a last line that was cut short is passed over."""
    pending: tuple[int, bytes] | None = None
    for number, text in enumerate(read_lines(path), start=1):
        if pending is not None:
            yield pending[0], _parse(path, *pending)
        pending = (number, text)
    if pending is not None:
        try:
            yield pending[0], json.loads(pending[1])
        except ValueError:
            if pending[0] == 1:
                raise InputError(f"{path}:1: not a {FORMAT_NAME}") from None


def _parse(path: Path, number: int, text: bytes) -> Any:  # noqa: ANN401
    try:
        return json.loads(text)
    except ValueError as error:
        raise InputError(f"{path}:{number}: not JSON ({error})") from None


class _Run:
    """What the lines so far said."""

    def __init__(self) -> None:
        self._added: dict[int, list[Any]] = {}
        self._ended: dict[int, tuple[int, str, int, list[int]]] = {}
        self._steps: list[list[Any]] = []
        self._updates: list[RecordedUpdate] = []
        self._aborts: list[tuple[int, int]] = []
        self._clients: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        self._rows: list[list[int]] = []

    def take(self, row: list[Any]) -> None:
        """Takes in one line."""
        kind = row[0]
        if kind == "a":
            self._added[row[2]] = row
        elif kind == "s":
            _, start, end, entries, admitted, preempted, running, waiting, free = row
            self._step(start, end, entries, admitted, preempted, (running, waiting, free))
        elif kind == "d":
            _, start, end, running, waiting, free = row
            self._step(start, end, self._rows, [], [], (running, waiting, free))
        elif kind == "u":
            _, start, end, step, ended = row
            if step != len(self._updates):
                raise ValueError(f"update of step {step}, not of {len(self._updates)}")
            self._updates.append(RecordedUpdate(step, start, end, [item[0] for item in ended]))
            for number, reason, outputs, blocks in ended:
                self._ended[number] = (end, reason, outputs, blocks)
        elif kind == "x":
            for number, _, outputs, blocks in row[2]:
                self._ended[number] = (row[1], "abort", outputs, blocks)
                self._aborts.append((row[1], number))
        elif kind == "c":
            _, number, sent, first, gaps = row
            self._clients[number] = (sent, first, tuple(gaps))
        elif kind != "e":
            raise ValueError(f"unknown kind {kind!r}")

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
            if row[1] <= last_us
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
                if number not in found and computed[number] >= self._added[number][3]:
                    found[number] = update.end_us
        return found

    def _request(self, row: list[Any], first_token_us: int, last_us: int) -> RecordedRequest:
        _, added_us, number, prompt_tokens, max_tokens, sent_us, blocks, priority = row
        unfinished = (last_us, "", max_tokens, blocks)
        finish_us, reason, outputs, all_blocks = self._ended.get(number, unfinished)
        gaps: tuple[int, ...] | None = None
        client_us: int | None = None
        first_token_us = min(first_token_us, finish_us)
        if number in self._clients:
            client_us, first_token_us, gaps = self._clients[number]
            sent_us, finish_us = client_us, first_token_us + sum(gaps)
        return RecordedRequest(
            id=number,
            arrival_us=min(sent_us, added_us),
            added_us=added_us,
            first_token_us=first_token_us,
            finish_us=finish_us,
            prompt_tokens=prompt_tokens,
            output_tokens=max(1, outputs),
            prefix_group=None,
            sent_us=client_us,
            token_gaps_us=gaps,
            max_tokens=max_tokens,
            reason=reason,
            blocks=tuple(all_blocks or blocks),
            priority=priority,
        )
