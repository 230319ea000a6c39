"""Reads step logs line by line and checks what it reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from engine.core.errors import InputError
from engine.steplog.decode import header_from_json, record_from_json
from engine.steplog.fields import Json
from engine.steplog.files import read_lines
from engine.steplog.records import (
    DecodeStretch,
    ExpandedRecord,
    LogHeader,
    Record,
    StepRecord,
    expand,
)


class StepLogReader:
    """An iterable over the records of one log; each iteration reads the file anew.

    Raises:
        InputError: not a step log, another version, damaged, or incomplete; the message names
            file and line. A wrong header is found at once, the rest while reading.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        lines = read_lines(self.path)
        first = next(lines, None)
        if first is None:
            raise InputError(f"{self.path}: empty file, not a step log")
        try:
            self.header: LogHeader = header_from_json(_parse(first))
        except ValueError as error:
            raise InputError(f"{self.path}:1: {error}") from None

    def __iter__(self) -> Iterator[Record]:
        """The records in file order, stretches as they are."""
        lines = read_lines(self.path)
        next(lines)
        last_steps: dict[int, int] = {}
        number = 1
        for number, text in enumerate(lines, start=2):
            try:
                line = _parse(text)
                if line.get("type") == "end":
                    self._check_end(line, number, next(lines, None))
                    return
                record = record_from_json(line)
                self._check_record(record, last_steps)
            except ValueError as error:
                if isinstance(error, InputError):
                    raise
                raise InputError(f"{self.path}:{number}: {error}") from None
            yield record
        raise InputError(f"{self.path}:{number}: the log ends without its end record")

    def expanded(self) -> Iterator[ExpandedRecord]:
        """The records with every stretch replaced by its steps."""
        return expand(self, self.header.kernel.block_size)

    def _check_end(self, line: Json, number: int, after: bytes | None) -> None:
        if line.get("records") != number - 2:
            raise ValueError(f"end record counts {line.get('records')!r}, not {number - 2} records")
        if after is not None:
            raise ValueError("text after the end record")

    def _check_record(self, record: Record, last_steps: dict[int, int]) -> None:
        if record.replica >= self.header.num_replicas:
            raise ValueError(
                f"replica {record.replica}: the header has {self.header.num_replicas} replicas"
            )
        if isinstance(record, DecodeStretch):
            first, last = record.first_step, record.first_step + record.num_steps - 1
        elif isinstance(record, StepRecord):
            first = last = record.step
        else:
            return
        before = last_steps.get(record.replica)
        if before is not None and first != before + 1:
            raise ValueError(f"step {first} follows step {before}")
        last_steps[record.replica] = last


def _parse(text: bytes) -> Json:
    try:
        line = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        line = _parse_slowly(text)
    if not isinstance(line, dict):
        raise ValueError("not a JSON object")
    return line


def _parse_slowly(text: bytes) -> object:
    """The same by Python's own reader.

    It takes ids with half a surrogate pair, which its writer lets pass, and names the column of
    an error.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
