"""Reading text files row by row, with errors that name file and row."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.errors import InputError
from sim.workloads.table import MAX_TOKENS


class Row(NamedTuple):
    """One data row: its line in the file and its fields by column name."""

    line: int
    fields: dict[str, Any]


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a plain or gzip text file, without line ends; a byte-order mark is cut."""
    line = 0
    try:
        with path.open("rb") as probe:
            packed = probe.read(2) == b"\x1f\x8b"
        opener = gzip.open if packed or path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            for line, text in enumerate(file, start=1):
                yield line, text.rstrip("\r\n")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        where = f" after line {line}" if line else ": nothing in it can be read"
        raise InputError(f"{path}: truncated or damaged gzip{where} ({error})") from None
    except UnicodeDecodeError:
        where = f" after line {line}" if line else ""
        raise InputError(f"{path}: not UTF-8 text{where}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of a JSON-lines or CSV file; the first character of the file decides which.

    Raises:
        InputError: the file is empty, damaged, or a row does not match the header.
    """
    lines = ((line, text) for line, text in read_lines(path) if text.strip())
    first = next(lines, None)
    if first is None:
        raise InputError(f"{path}: is empty")
    if first[1].lstrip().startswith("{"):
        yield _json_row(path, *first)
        for line, text in lines:
            yield _json_row(path, line, text)
        return
    header = [name.strip() for name in _csv_fields(path, *first)]
    if len(set(header)) != len(header):
        raise InputError(f"{path}:{first[0]}: a column is named twice: {header}")
    count = 0
    for line, text in lines:
        values = _csv_fields(path, line, text)
        if len(values) != len(header):
            raise InputError(
                f"{path}:{line}: {text[:80]!r} has {len(values)} fields, the header {len(header)}"
            )
        count += 1
        yield Row(line, dict(zip(header, values, strict=True)))
    if not count:
        raise InputError(f"{path}: has a header but no rows")


def _csv_fields(path: Path, line: int, text: str) -> list[str]:
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise InputError(f"{path}:{line}: {text[:80]!r}: not a CSV row ({error})") from None


def _json_row(path: Path, line: int, text: str) -> Row:
    try:
        fields = json.loads(text, parse_float=Decimal, parse_constant=Decimal)
    except ValueError as error:
        raise InputError(f"{path}:{line}: {text[:80]!r}: not a JSON row ({error})") from None
    if not isinstance(fields, dict):
        raise InputError(f"{path}:{line}: {text[:80]!r}: must be a JSON object")
    return Row(line, fields)


def field(path: Path, row: Row, column: str) -> object:
    """The value of a column that the row must have."""
    if column not in row.fields:
        raise InputError(f"{path}:{row.line}: column {column!r} is missing")
    return row.fields[column]


def token_count(path: Path, row: Row, column: str) -> int:
    """A length: a whole number from 1 on."""
    value = field(path, row, column)
    number = _decimal(value)
    if number is None or number != number.to_integral_value():
        raise InputError(f"{path}:{row.line}: {column}={value!r}: must be a whole number")
    if not 1 <= number < MAX_TOKENS:
        raise InputError(f"{path}:{row.line}: {column}={value!r}: must be 1 to {MAX_TOKENS - 1}")
    return int(number)


def time_ns(path: Path, row: Row, column: str, unit_ns: int) -> int:
    """A time of `unit_ns` nanoseconds a unit, exact to the nanosecond; negative ones are errors."""
    value = field(path, row, column)
    number = _decimal(value)
    if number is None:
        raise InputError(f"{path}:{row.line}: {column}={value!r}: must be a finite number")
    if number < 0:
        raise InputError(f"{path}:{row.line}: {column}={value!r}: must not be negative")
    scaled = round(number * unit_ns)
    if scaled >= 1 << 62:
        raise InputError(f"{path}:{row.line}: {column}={value!r}: is too large for a time")
    return scaled


def _decimal(value: object) -> Decimal | None:
    """The finite number that a field holds, or None."""
    if isinstance(value, bool) or not isinstance(value, int | str | Decimal):
        return None
    try:
        number = Decimal(value.strip() if isinstance(value, str) else value)
    except InvalidOperation:
        return None
    return number if number.is_finite() and abs(number.adjusted()) < 40 else None
