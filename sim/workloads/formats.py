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
_STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|([+-])(\d\d):?(\d\d))?$"
)
PLAIN_SCHEMA = (
    "arrival_s, prompt_tokens, output_tokens and, if wanted, request_id, priority, session_id,"
    " hash_ids"
)


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """One row format.

    `unit_ns` is the length of the arrival's unit in ns (`WALL_CLOCK` for a date and time). Lengths
    of a format with `chars` are characters, and so is `hash_block`; those of `text` are texts. A
    row with `delay` (in `delay_ns`) in place of an arrival follows the end of its session's row
    before. `parent` names the columns of a row's own id and of the row that it continues.
    `ignored` columns repeat or add up others. `measured` rows come in the order of their ends.
    A format with `any_of` has at least one of those columns.
    """

    name: str
    prompt: str
    output: str
    arrival: str | None = None
    unit_ns: int = WALL_CLOCK
    hash_block: int = 0
    request_id: str | None = None
    session: str | None = None
    parent: tuple[str, str] | None = None
    delay: str | None = None
    delay_ns: int = 10**6
    ignored: tuple[str, ...] = ()
    any_of: tuple[str, ...] = ()
    total: str | None = None
    chars: bool = False
    text: bool = False
    measured: bool = False

    @property
    def required(self) -> list[str]:
        """Columns that the first row has."""
        columns = [self.arrival, self.prompt, self.output, self.request_id, self.total]
        return [name for name in columns if name] + (["hash_ids"] if self.hash_block else [])

    @property
    def known(self) -> set[str]:
        """Columns that are used, or left out without a word."""
        more = [self.session, self.delay, "priority", *(self.parent or ())]
        return {*self.required, *self.ignored, *(name for name in more if name)}


FORMATS = (
    TraceFormat("azure", "ContextTokens", "GeneratedTokens", "TIMESTAMP"),
    TraceFormat(
        "burstgpt", "Request tokens", "Response tokens", "Timestamp", 10**9, session="Session ID",
        ignored=("Model", "Total tokens", "Log Type", "Elapsed time"),
    ),
    TraceFormat(
        "vidur", "num_prefill_tokens", "num_decode_tokens", "arrived_at", 10**9,
        ignored=("num_total_tokens", "pd_ratio"),
    ),
    TraceFormat(
        "lengths", "num_prefill_tokens", "num_decode_tokens", ignored=("pd_ratio",),
        total="num_total_tokens",
    ),
    TraceFormat(
        "splitwise", "prompt_size", "token_size", "arrival_timestamp", 10**9,
        request_id="request_id", ignored=("request_type", "application_id", "batch_size"),
    ),
    TraceFormat(
        "blis", "input_tokens", "output_tokens", "arrival_time_us", 10**3, request_id="request_id",
        session="session_id", ignored=("tenant_id", "slo_class", "round_index"),
    ),
    TraceFormat(
        "agent", "input_chars", "output_chars", "timestamp_us", 10**3, hash_block=64,
        session="session_id", ignored=("step",), chars=True,
    ),
    TraceFormat(
        "blocks16", "input_length", "output_length", "arrival_time_ns", 1, hash_block=16,
        request_id="request_id",
    ),
    TraceFormat(
        "bailian", "input_length", "output_length", "timestamp", 10**9, hash_block=16,
        parent=("chat_id", "parent_chat_id"), ignored=("type", "turn"),
        any_of=("chat_id", "parent_chat_id", "turn"),
    ),
    TraceFormat(
        "mooncake", "input_length", "output_length", "timestamp", 10**6, hash_block=512,
        session="session_id", delay="delay",
    ),
    TraceFormat(
        "mooncake", "input_length", "output_length", "timestamp", 10**6, session="session_id",
        delay="delay",
    ),
    # What tools of measurement write, made flat by `sim.workloads.measured`.
    TraceFormat("vllm_bench", "input_len", "output_len", "start_time", 10**9, measured=True),
    TraceFormat("vllm_bench", "input_len", "output_len", measured=True),
    TraceFormat(
        "aiperf", "input_sequence_length", "output_sequence_length", "request_start_ns", 1,
        session="conversation_id", measured=True,
    ),
    TraceFormat(
        "guidellm", "guide_prompt_tokens", "guide_output_tokens", "request_start_time", 10**9,
        measured=True,
    ),
    # Texts, made flat by `sim.workloads.conversations`.
    TraceFormat(
        "text", "prompt_text", "answer", "turn_ms", 10**6, session="session", delay="delay",
        text=True,
    ),
    TraceFormat("text", "prompt_text", "answer", session="session", delay="delay", text=True),
)  # fmt: skip

PLAIN_ARRIVALS = {
    "arrival_ns": 1,
    "arrival_us": 10**3,
    "arrival_ms": 10**6,
    "arrival_s": 10**9,
}
# Columns of our own requests.csv, so that a run's table is itself a trace.
RESULT_COLUMNS = (
    "row", "replica", "status", "first_scheduled_ns", "first_token_ns", "finish_ns", "hit_tokens",
    "preemptions", "preempted_ns", "queue_ms", "ttft_ms", "tpot_ms", "e2el_ms",
)  # fmt: skip


def detect_format(path: Path, row: Row) -> TraceFormat:
    """The format whose columns the first row has.

    Raises:
        InputError: no format fits; the message names the nearest one and what is missing.
    """
    columns = set(row.fields)
    for known in FORMATS:
        if known.any_of and not columns & set(known.any_of):
            continue
        if columns >= set(known.required):
            return known
    plain = _plain_format(path, row)
    if plain is not None:
        return plain
    raise InputError(f"{path}:{row.line}: {_explain(columns)}")


def _plain_format(path: Path, row: Row) -> TraceFormat | None:
    columns = set(row.fields)
    if not columns >= {"prompt_tokens", "output_tokens"}:
        return None
    arrivals = [name for name in PLAIN_ARRIVALS if name in columns]
    if len(arrivals) > 1:
        raise InputError(f"{path}:1: more than one arrival column: {', '.join(arrivals)}")
    return TraceFormat(
        "plain",
        "prompt_tokens",
        "output_tokens",
        arrivals[0] if arrivals else None,
        PLAIN_ARRIVALS[arrivals[0]] if arrivals else WALL_CLOCK,
        hash_block=16 if "hash_ids" in columns else 0,
        request_id="request_id" if "request_id" in columns else None,
        session="session_id",
        ignored=RESULT_COLUMNS,
    )


def _explain(columns: set[str]) -> str:
    plain = TraceFormat("plain", "prompt_tokens", "output_tokens", ignored=RESULT_COLUMNS)
    formats = [known for known in (*FORMATS, plain) if not known.text and not known.measured]
    nearest = max(formats, key=lambda known: _likeness(columns, known))
    hint = f"convert it to the plain columns {PLAIN_SCHEMA}"
    if not _likeness(columns, nearest):
        names = ", ".join(dict.fromkeys(known.name for known in (*FORMATS, plain)))
        return f"its columns belong to no known format ({names}); {hint}"
    missing = [name for name in nearest.required if name not in columns]
    if not missing:
        return f"format {nearest.name!r} also has one of {', '.join(nearest.any_of)}; {hint}"
    return f"column {missing[0]!r} of the nearest format {nearest.name!r} is missing; or {hint}"


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
            f"{path}:{row.line}: {known.arrival}={value!r}: must be YYYY-MM-DD HH:MM:SS.fraction,"
            " with or without an offset"
        ) from None
    whole_s = (moment - _EPOCH) // timedelta(seconds=1)
    if match[4]:
        offset_s = (int(match[5]) * 60 + int(match[6])) * 60
        whole_s -= offset_s if match[4] == "+" else -offset_s
    return whole_s * 10**9 + int((match[3] or "").ljust(9, "0"))
