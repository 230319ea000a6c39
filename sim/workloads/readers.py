"""Reads a trace into a workload table; everything is checked before anything runs."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

import numpy as np

from engine.core.errors import ConfigError, InputError
from sim.workloads.arrivals import draw_arrivals
from sim.workloads.blocks import block_size_of, name_answers
from sim.workloads.columns import Columns, id_list
from sim.workloads.conversations import encoder, is_text, turn_rows
from sim.workloads.formats import TraceFormat, detect_format
from sim.workloads.measured import is_measured, measured_rows
from sim.workloads.table import HashedPrefixes, Texts, Workload
from sim.workloads.text import Row, read_rows

_CHARS_PER_TOKEN = 4
# Rows that a block size must fit to be found.
_SAMPLE = 100


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How to read a trace.

    `rate` is the arrival rate of a trace without arrival times, drawn from process `arrival`
    with `burstiness`; a trace with times is sped up or slowed down to it. Texts need `tokenizer`
    (a folder) or `chars_per_token`. `hash_block_tokens` of None is found from the rows.
    `output_tokens` is the length of answers that a trace of prompts lacks. Of a timed trace only
    the `window_length_s` from `window_start_s` after its first row are read. Rows without tokens
    and failed requests are left out and counted, or errors with `on_bad_row="error"`.
    """

    num_requests: int | None = None
    rate: float | None = None
    arrival: str = "poisson"
    burstiness: float = 1.0
    seed: int = 0
    chars_per_token: int | None = None
    tokenizer: str | None = None
    hash_block_tokens: int | None = None
    output_tokens: int | None = None
    window_start_s: float = 0
    window_length_s: float | None = None
    on_bad_row: str = "leave-out"

    def __post_init__(self) -> None:
        names = ("chars_per_token", "hash_block_tokens", "num_requests", "output_tokens")
        for option in names:
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ConfigError(option, value, "must be at least 1")
        if self.on_bad_row not in ("leave-out", "error"):
            raise ConfigError("on_bad_row", self.on_bad_row, "must be leave-out or error")

    @property
    def window_ns(self) -> tuple[int, int | None]:
        """Start and end of the window after the first row."""
        start = round(self.window_start_s * 1e9)
        if self.window_length_s is None:
            return start, None
        return start, start + round(self.window_length_s * 1e9)


@dataclass(frozen=True, slots=True)
class Opened:
    """A trace whose first rows were seen: its format, block size and all its rows."""

    format: TraceFormat
    rows: Iterator[Row]
    block_units: int = 0

    @property
    def timed(self) -> bool:
        """Whether rows say when they arrive."""
        return self.format.arrival is not None


def open_trace(path: Path, hash_block_tokens: int | None = None) -> Opened:
    """Finds the format of a trace from its first rows.

    Raises:
        InputError: unreadable, or of no known format.
    """
    raw = read_rows(path)
    first_raw = next(raw)
    rows = _flat(path, first_raw, raw)
    sample = list(islice(rows, _SAMPLE))
    first = next((row for row in sample if not row.left_out), None)
    if first is None:
        reason = sample[0].left_out if sample else "it holds no request"
        raise InputError(f"{path}: no row is left: {reason}")
    known = detect_format(path, first)
    if known.text:
        known = replace(known, name=_text_name(first_raw))
    block = known.hash_block
    if known.hash_block:
        block = _block_units(path, known, sample, hash_block_tokens)
    return Opened(known, chain(sample, rows), block)


def _flat(path: Path, first: Row, rest: Iterator[Row]) -> Iterator[Row]:
    """One row per request, whatever the file holds."""
    measured, text = is_measured(first), is_text(first)
    for row in chain((first,), rest):
        if measured and is_measured(row):
            yield from measured_rows(path, row)
        elif text and is_text(row):
            yield from turn_rows(path, row)
        elif measured or text:
            raise InputError(f"{path}:{row.line}: is of another format than the rows above")
        else:
            yield row


def _text_name(row: Row) -> str:
    if "turns" in row.fields:
        return "aiperf_multi_turn"
    return "vllm_custom" if "prompt" in row.fields else "sharegpt"


def _block_units(path: Path, known: TraceFormat, sample: list[Row], asked: int | None) -> int:
    """The block size in the units of the lengths."""
    if asked is not None:
        return asked
    pairs = []
    for row in sample:
        length, ids = row.fields.get(known.prompt), id_list(row.fields.get("hash_ids"))
        text = str(length)
        if ids is not None and text.isdigit() and int(text):
            pairs.append((int(text), len(ids)))
    found = block_size_of(pairs, known.hash_block)
    # Where none fits, the row that does not fit the usual one is named when it is read.
    return known.hash_block if found is None else found


def read_trace(path: Path, options: TraceOptions) -> Workload:
    """Reads and checks a trace of any known format.

    Raises:
        InputError: the file is unreadable or a row is wrong; the message names file, line, value.
        ConfigError: the trace lacks something that an option must give.
    """
    opened = open_trace(path, options.hash_block_tokens)
    known = opened.format
    per_token = options.chars_per_token or _CHARS_PER_TOKEN
    encode = None
    if known.text:
        encode = encoder(path, options.tokenizer, options.chars_per_token)
    columns = Columns(
        path, known, opened.block_units, per_token, encode, options.output_tokens,
        options.on_bad_row == "leave-out",
        options.window_ns if opened.timed and not known.measured else (0, None),
    )  # fmt: skip
    extra: dict[str, None] = {}
    expected = known.known
    for row in opened.rows:
        columns.append(row)
        if not row.fields.keys() <= expected:
            extra.update(dict.fromkeys(name for name in row.fields if name not in expected))
            expected.update(row.fields)
        if columns.past_window or len(columns) == options.num_requests:
            break
    if not len(columns):
        if columns.first_left_out:
            raise InputError(f"{columns.first_left_out}; no row is left")
        raise InputError(f"{path}: no row lies in the window")
    workload = _table(path, opened, columns, options)
    if extra:
        workload.notes.append(f"columns left out: {', '.join(extra)}"[:200])
    return workload


def _table(path: Path, opened: Opened, columns: Columns, options: TraceOptions) -> Workload:
    known = opened.format
    workload = Workload(
        path.name,
        columns.arrival_ns,
        columns.prompt_tokens,
        columns.output_tokens,
        request_ids=columns.request_ids or None,
        num_sessions=columns.num_roots,
        left_out=dict(columns.left_out),
    )
    if any(columns.priorities):
        workload.priorities = columns.priorities
    if known.text:
        workload.texts = Texts(columns.ids, columns.offsets, columns.previous)
    elif opened.block_units:
        workload.hashed = HashedPrefixes(columns.block_tokens, columns.ids, columns.offsets)
        if any(row >= 0 for row in columns.previous):
            name_answers(
                workload.hashed, columns.previous, columns.prompt_tokens, columns.output_tokens
            )
    _chain(workload, columns)
    if known.measured and known.arrival:
        _sort(workload, options.window_ns)
        if not len(workload):
            raise InputError(f"{path}: no row lies in the window")
    _set_arrivals(path, known, workload, options)
    workload.parameters = {"trace": path.name, "format": known.name}
    _note_options(workload, opened, options)
    if known.arrival and options.rate is not None:
        _scale_to_rate(workload, options.rate)
    return workload


def _note_options(workload: Workload, opened: Opened, options: TraceOptions) -> None:
    """Puts into the parameters what decided how the trace was read."""
    known, parameters = opened.format, workload.parameters
    if known.chars:
        parameters["chars_per_token"] = options.chars_per_token or _CHARS_PER_TOKEN
    elif known.text and options.tokenizer is None:
        parameters["chars_per_token"] = options.chars_per_token
    if known.text and options.tokenizer is not None:
        parameters["tokenizer"] = Path(options.tokenizer).name
    if opened.block_units and opened.block_units != known.hash_block:
        parameters["hash_block_tokens"] = opened.block_units
    if workload.left_out:
        parameters["left_out"] = dict(workload.left_out)
    if options.window_ns != (0, None) and opened.timed:
        parameters["window_start_s"] = options.window_start_s
        parameters["window_length_s"] = options.window_length_s
    if not known.arrival:
        parameters.update(arrival=options.arrival, rate=options.rate, burstiness=options.burstiness)


def _chain(workload: Workload, columns: Columns) -> None:
    """Lets rows that wait for their session's row before follow it."""
    waiting = [row for row, time in enumerate(columns.arrival_ns) if time < 0]
    if not waiting:
        return
    workload.next_row = array("q", [-1]) * len(columns)
    workload.think_ns = columns.think_ns
    for row in waiting:
        workload.next_row[columns.previous[row]] = row


def _sort(workload: Workload, window_ns: tuple[int, int | None]) -> None:
    """By arrival, since tools write requests in the order of their ends; then the window."""
    order = sorted(range(len(workload)), key=workload.arrival_ns.__getitem__)
    first, (start, end) = workload.arrival_ns[order[0]], window_ns
    inside = [
        row
        for row in order
        if start <= (since := workload.arrival_ns[row] - first) and (end is None or since < end)
    ]
    for name in ("arrival_ns", "prompt_tokens", "output_tokens"):
        column = getattr(workload, name)
        setattr(workload, name, array("q", [column[row] for row in inside]))


def _set_arrivals(
    path: Path, known: TraceFormat, workload: Workload, options: TraceOptions
) -> None:
    times = workload.arrival_ns
    if known.arrival:
        # Whatever clock the trace uses, the run starts with its first request.
        first_ns = next((time for time in times if time >= 0), 0)
        workload.arrival_ns = array("q", [time - first_ns if time >= 0 else time for time in times])
        return
    if options.rate is None:
        raise ConfigError("rate", None, f"{path.name} has no arrival times, so a rate is needed")
    rng = np.random.default_rng(options.seed)
    starts = [row for row, time in enumerate(times) if time >= 0]
    drawn = draw_arrivals(options.arrival, options.rate, len(starts), rng, options.burstiness)
    for row, time in zip(starts, drawn, strict=True):
        times[row] = time


def _scale_to_rate(workload: Workload, rate: float) -> None:
    own = workload.mean_rate()
    if own is None:
        raise ConfigError("rate", rate, f"{workload.name} spans no time, so it has no rate")
    workload.scale_arrivals(rate / own)


def read_lengths(path: Path) -> Workload:
    """Lengths of any trace, for empirical distributions; arrivals are without meaning."""
    return read_trace(path, TraceOptions(rate=1.0))
