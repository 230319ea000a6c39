"""Reading text files row by row, with errors that name file and row."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.errors import InputError
from sim.workloads.table import MAX_TOKENS


class Row(NamedTuple):
    """One data row: its line in the file, its fields by column name, and why it is left out."""

    line: int
    fields: dict[str, Any]
    left_out: str = ""


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
    """Rows of a JSON document, a JSON-lines or a CSV file; its first characters decide which.

    Raises:
        InputError: the file is empty, damaged, or a row does not match the header.
    """
    lines = ((line, text) for line, text in read_lines(path) if text.strip())
    first = next(lines, None)
    if first is None:
        raise InputError(f"{path}: is empty")
    opening = first[1].lstrip()[:1]
    if opening == "[":
        yield from _array_rows(path, chain((first,), lines))
    elif opening == "{" and _object_of(first[1]) is None:
        yield _whole_document(path, chain((first,), lines))
    elif opening == "{":
        for line, text in chain((first,), lines):
            yield _json_row(path, line, text)
    else:
        yield from _csv_rows(path, first, lines)


def _csv_rows(
    path: Path, first: tuple[int, str], lines: Iterator[tuple[int, str]]
) -> Iterator[Row]:
    header = [name.strip() for name in _csv_fields(path, *first)]
    if len(set(header)) != len(header):
        raise InputError(f"{path}:{first[0]}: a column is named twice")
    count = 0
    for line, text in lines:
        values = _csv_fields(path, line, text)
        if len(values) != len(header):
            raise InputError(
                f"{path}:{line}: the row has {len(values)} fields, the header {len(header)}"
            )
        count += 1
        yield Row(line, dict(zip(header, values, strict=True)))
    if not count:
        raise InputError(f"{path}: has a header but no rows")


def _csv_fields(path: Path, line: int, text: str) -> list[str]:
    if '"' not in text:
        return text.split(",")  # what the reader would do, in a tenth of the time
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise InputError(f"{path}:{line}: not a CSV row ({error})") from None


_DECODER = json.JSONDecoder(parse_float=Decimal, parse_constant=Decimal)


def _object_of(text: str) -> dict[str, Any] | None:
    """The JSON object of a text, or None."""
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _json_row(path: Path, line: int, text: str) -> Row:
    fields = _object_of(text)
    if fields is None:
        raise InputError(f"{path}:{line}: is no complete JSON object")
    return Row(line, fields)


def _whole_document(path: Path, lines: Iterator[tuple[int, str]]) -> Row:
    """A JSON object over many lines, as one row."""
    fields = _object_of("\n".join(text for _, text in lines))
    if fields is None:
        raise InputError(f"{path}: is no complete JSON document, and its first line no JSON row")
    return Row(1, fields)


def _array_rows(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[Row]:
    """The objects of a JSON array, one after the other; `line` counts them."""
    pending, count, ended = "", 0, False
    # A long object is tried again only when it has grown by half.
    tried = 0
    for _, text in lines:
        pending += text if pending or count else text.lstrip().removeprefix("[")
        pending += "\n"
        while not ended and len(pending) >= tried * 3 // 2:
            pending = pending.lstrip(", \t\n\r")
            ended = pending.startswith("]")
            if not pending or ended:
                break
            try:
                value, end = _DECODER.raw_decode(pending)
            except (ValueError, RecursionError):
                tried = len(pending)
                break
            tried, count, pending = 0, count + 1, pending[end:]
            yield _element(path, count, value)
    while not ended and (pending := pending.lstrip(", \t\n\r")):
        if pending.startswith("]"):
            ended = True
            break
        try:
            value, end = _DECODER.raw_decode(pending)
        except (ValueError, RecursionError):
            break
        count, pending = count + 1, pending[end:]
        yield _element(path, count, value)
    if not ended:
        raise InputError(f"{path}: element {count + 1} of the JSON array is not complete")
    if not count:
        raise InputError(f"{path}: is an empty JSON array")


def _element(path: Path, number: int, value: object) -> Row:
    if not isinstance(value, dict):
        raise InputError(f"{path}: element {number} of the JSON array is no object")
    return Row(number, value)


def field(path: Path, row: Row, column: str) -> object:
    """The value of a column that the row must have."""
    if column not in row.fields:
        raise InputError(f"{path}:{row.line}: column {column!r} is missing")
    return row.fields[column]


def token_count(path: Path, row: Row, column: str) -> int:
    """A length: a whole number; a row of length 0 is left out by the caller."""
    value = field(path, row, column)
    if type(value) is str and len(value) < 8 and value.isdigit() and value.isascii():
        value = int(value)
    if type(value) is int and 0 < value < MAX_TOKENS:
        return value
    number = _decimal(value)
    if number is None or number != number.to_integral_value():
        raise InputError(f"{path}:{row.line}: {column}={value!r}: must be a whole number")
    if not 0 <= number < MAX_TOKENS:
        raise InputError(f"{path}:{row.line}: {column}={value!r}: must be 1 to {MAX_TOKENS - 1}")
    return int(number)


def whole(path: Path, row: Row, column: str, default: int) -> int:
    """An integer of either sign, or the default where the column is absent or empty."""
    value = row.fields.get(column)
    if value is None or value == "":
        return default
    number = _decimal(value)
    if number is None or number != number.to_integral_value() or abs(number) >= 1 << 31:
        raise InputError(f"{path}:{row.line}: {column}={value!r}: must be a whole number")
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
