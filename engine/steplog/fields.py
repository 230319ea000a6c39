"""Checked reading of the fields of one step-log line.

By hand: typed structures would have to be made into records again, and their errors say less
(figures: docs/benchmarks.md, "The step log").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from engine.core.plan import Admission, NewBlocks
from engine.core.request import RequestId
from engine.core.tokens import Prompt
from engine.steplog.ids import decode_ids, explicit_ids
from engine.steplog.records import ChunkRecord, FinishRecord

Json = dict[str, object]
T = TypeVar("T")
D = TypeVar("D")
_MOST_EXPLICIT_IDS = 1 << 26
FINISH_REASONS = ("stop", "length", "abort", "error")


class Fields:
    """The fields of one line; each is taken once, and what is left over is an error."""

    def __init__(self, line: Json) -> None:
        self._line = line

    def take(self, name: str, check: Callable[[object], T], *default: D) -> T | D:
        """The checked value of a field.

        Raises:
            ValueError: it is missing without a default, or `check` refuses it.
        """
        if name not in self._line:
            if default:
                return default[0]
            raise ValueError(f"field {name!r} is missing")
        value = self._line.pop(name)
        try:
            return check(value)
        except (TypeError, ValueError, LookupError) as error:
            raise ValueError(f"field {name!r}: {error}") from None

    def end(self) -> None:
        """Refuses fields that nobody took."""
        if self._line:
            raise ValueError(f"unknown field {next(iter(self._line))!r}")


def check_int(value: object) -> int:
    """An integer."""
    if type(value) is not int:
        raise ValueError(f"{short(value)} is not an integer")
    return value


def check_count(value: object) -> int:
    """A whole number >= 0."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{short(value)} is not a whole number >= 0")
    return value


def check_counts(value: object) -> tuple[int, ...]:
    """A list of whole numbers >= 0, checked as a whole: lists of durations are long."""
    items = check_list(value)
    if set(map(type, items)) <= {int}:
        counts = cast(list[int], items)
        if min(counts, default=0) >= 0:
            return tuple(counts)
    return tuple([check_count(item) for item in items])


def check_flag(value: object) -> bool:
    """True or false, also as 1 or 0."""
    if value not in (0, 1):
        raise ValueError(f"{short(value)} is not a flag")
    return bool(value)


def check_text(value: object) -> str:
    """A string."""
    if type(value) is not str:
        raise ValueError(f"{short(value)} is not a string")
    return value


def check_request_id(value: object) -> RequestId:
    """An integer or a string."""
    if type(value) is not int and type(value) is not str:
        raise ValueError(f"{short(value)} is not a request id")
    return value


def tuple_of(check: Callable[[object], T]) -> Callable[[object], tuple[T, ...]]:
    """A check for a list whose items pass `check`."""

    def checked(value: object) -> tuple[T, ...]:
        return tuple([check(item) for item in check_list(value)])

    return checked


def check_list(value: object, length: int | None = None) -> list[object]:
    """A list, of `length` items if that is given."""
    if type(value) is not list or (length is not None and len(value) != length):
        wanted = "a list" if length is None else f"a list of {length}"
        raise ValueError(f"{short(value)} is not {wanted}")
    return value


def short(value: object) -> str:
    """A value for an error message, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def check_object(value: object) -> Json:
    """A JSON object."""
    if type(value) is not dict:
        raise ValueError(f"{short(value)} is not an object")
    return value


def check_ids(value: object) -> tuple[int, ...]:
    """Token or block ids in compact form, made explicit."""
    items = check_list(value)
    if set(map(type, items)) <= {int}:
        return tuple(explicit_ids(cast(list[int], items)))
    ids = decode_ids(items)
    if len(ids) > _MOST_EXPLICIT_IDS:
        raise ValueError(f"{len(ids)} ids are more than one step can have")
    return tuple(ids)


def check_prompt(value: object) -> Prompt:
    """Token ids in compact form, left lazy."""
    return decode_ids(check_list(value))


def check_chunk(value: object) -> ChunkRecord:
    """A chunk: row, id, first position, tokens, samples."""
    row, request_id, first, tokens, samples = check_list(value, 5)
    num_tokens = check_count(tokens)
    if num_tokens < 1:
        raise ValueError("a chunk has no tokens")
    return ChunkRecord(
        check_count(row),
        check_request_id(request_id),
        check_count(first),
        num_tokens,
        check_flag(samples),
    )


def check_admission(value: object) -> Admission:
    """An admission: id, hit tokens, blocks used, free, same step, resumed."""
    request_id, *counts, resumed = check_list(value, 6)
    hit, used, free, same_step = map(check_count, counts)
    return Admission(check_request_id(request_id), hit, used, free, same_step, check_flag(resumed))


def check_blocks(value: object) -> NewBlocks:
    """New blocks of a table: id, first index, block ids."""
    request_id, first_index, block_ids = check_list(value, 3)
    return NewBlocks(check_request_id(request_id), check_count(first_index), check_ids(block_ids))


def check_decode_block(value: object) -> tuple[int, RequestId, int]:
    """A block that a decode took: step offset, id, block id."""
    offset, request_id, block_id = check_list(value, 3)
    return check_count(offset), check_request_id(request_id), check_count(block_id)


def check_finish(value: object) -> FinishRecord:
    """An end: id, reason."""
    request_id, reason = check_list(value, 2)
    if not isinstance(reason, str) or reason not in FINISH_REASONS:
        raise ValueError(f"{short(reason)} is no finish reason")
    return FinishRecord(check_request_id(request_id), reason)


def check_pair(value: object) -> tuple[str, str]:
    """Two strings."""
    key, text = check_list(value, 2)
    return check_text(key), check_text(text)
