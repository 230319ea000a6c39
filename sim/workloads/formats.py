"""The row formats of public traces, told apart by their columns."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from difflib import get_close_matches
from pathlib import Path

from engine.core.errors import InputError
from sim.workloads.text import Row, time_ns

_EPOCH = datetime(1970, 1, 1)
WALL_CLOCK = 0  # arrival is a wall-clock string and not a number of a unit
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?$")


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """One row format.

    `unit_ns` is the length of the arrival's unit in ns (`WALL_CLOCK` for a date and time). Lengths
    of a format with `chars` are characters, and so is `hash_block`.
    """

    name: str
    prompt: str
    output: str
    arrival: str | None = None
    unit_ns: int = WALL_CLOCK
    hash_block: int = 0
    request_id: str | None = None
    extra: tuple[str, ...] = ()
    total: str | None = None
    chars: bool = False

    @property
    def required(self) -> list[str]:
        """Columns that every row has."""
        columns = [self.arrival, self.prompt, self.output, self.request_id, self.total]
        return [name for name in columns if name] + (["hash_ids"] if self.hash_block else [])


FORMATS = (
    TraceFormat("azure", "ContextTokens", "GeneratedTokens", "TIMESTAMP"),
    TraceFormat(
        "mooncake", "input_length", "output_length", "timestamp", 10**6, hash_block=512
    ),
    TraceFormat("vidur", "num_prefill_tokens", "num_decode_tokens", "arrived_at", 10**9),
    TraceFormat(
        "lengths",
        "num_prefill_tokens",
        "num_decode_tokens",
        extra=("pd_ratio",),
        total="num_total_tokens",
    ),
    TraceFormat(
        "agent",
        "input_chars",
        "output_chars",
        "timestamp_us",
        10**3,
        hash_block=64,
        extra=("session_id", "step"),
        chars=True,
    ),
    TraceFormat(
        "blocks16",
        "input_length",
        "output_length",
        "arrival_time_ns",
        1,
        hash_block=16,
        request_id="request_id",
    ),
    TraceFormat(
        "bailian",
        "input_length",
        "output_length",
        "timestamp",
        10**9,
        hash_block=16,
        extra=("chat_id", "parent_chat_id", "type", "turn"),
    ),
)  # fmt: skip

PLAIN_ARRIVALS = {
    "arrival_ns": 1,
    "arrival_us": 10**3,
    "arrival_ms": 10**6,
    "arrival_s": 10**9,
}
# Columns of our own requests.csv, so that a run's table is itself a trace.
RESULT_COLUMNS = (
    "row",
    "replica",
    "status",
    "first_scheduled_ns",
    "first_token_ns",
    "finish_ns",
    "hit_tokens",
    "preemptions",
    "preempted_ns",
    "queue_ms",
    "ttft_ms",
    "tpot_ms",
    "e2el_ms",
)


def detect_format(path: Path, row: Row, hash_block: int) -> TraceFormat:
    """The format whose columns the first row has.

    `hash_block` is the block size of a plain trace's hash ids.

    Raises:
        InputError: no format fits; the message names the nearest one and what is amiss.
    """
    columns = set(row.fields)
    for known in FORMATS:
        allowed = {*known.required, *known.extra}
        if columns >= set(known.required) and columns <= allowed:
            # Bailian and Mooncake differ only by the columns beside those that both have.
            if known.name == "bailian" and not columns & set(known.extra):
                continue
            return known
    plain = _plain_format(path, row, hash_block)
    if plain is not None:
        return plain
    raise InputError(f"{path}:1: {_explain(columns)}")


def _plain_format(path: Path, row: Row, hash_block: int) -> TraceFormat | None:
    columns = set(row.fields)
    if not columns >= {"prompt_tokens", "output_tokens"}:
        return None
    arrivals = [name for name in PLAIN_ARRIVALS if name in columns]
    if len(arrivals) > 1:
        raise InputError(f"{path}:1: more than one arrival column: {', '.join(arrivals)}")
    known = {"prompt_tokens", "output_tokens", "request_id", "hash_ids", *arrivals}
    unknown = sorted(columns - known - set(RESULT_COLUMNS))
    if unknown:
        raise InputError(f"{path}:1: {unknown[0]!r} is not a column of the plain schema")
    return TraceFormat(
        "plain",
        "prompt_tokens",
        "output_tokens",
        arrivals[0] if arrivals else None,
        PLAIN_ARRIVALS[arrivals[0]] if arrivals else WALL_CLOCK,
        hash_block=hash_block if "hash_ids" in columns else 0,
        request_id="request_id" if "request_id" in columns else None,
    )


def _explain(columns: set[str]) -> str:
    plain = TraceFormat("plain", "prompt_tokens", "output_tokens")
    formats = (*FORMATS, plain)
    nearest = max(formats, key=lambda known: _likeness(columns, known))
    missing = [name for name in nearest.required if name not in columns]
    given = ", ".join(sorted(columns))[:120]
    if not _likeness(columns, nearest):
        names = ", ".join(known.name for known in formats)
        return f"columns {given} belong to no known format ({names})"
    if not missing:
        unknown = sorted(columns - {*nearest.required, *nearest.extra})
        return f"column {unknown[0]!r} does not belong to format {nearest.name!r}"
    return f"column {missing[0]!r} of format {nearest.name!r} is missing (found {given})"


def _likeness(columns: set[str], known: TraceFormat) -> float:
    exact = len(columns & set(known.required))
    close = [bool(get_close_matches(name, columns, 1, 0.75)) for name in known.required]
    return (exact + sum(close) / 2) / len(known.required)


def arrival_time_ns(path: Path, row: Row, known: TraceFormat) -> int:
    """The arrival of a row on the trace's own clock."""
    assert known.arrival is not None
    if known.unit_ns != WALL_CLOCK:
        return time_ns(path, row, known.arrival, known.unit_ns)
    value = row.fields.get(known.arrival)
    match = _STAMP.match(value.strip()) if isinstance(value, str) else None
    try:
        if match is None:
            raise ValueError
        moment = datetime.fromisoformat(f"{match[1]} {match[2]}")
    except ValueError:
        raise InputError(
            f"{path}:{row.line}: {known.arrival}={value!r}: must be YYYY-MM-DD HH:MM:SS.fraction"
        ) from None
    whole = (moment - _EPOCH) // timedelta(seconds=1)
    return whole * 10**9 + int((match[3] or "").ljust(9, "0"))
