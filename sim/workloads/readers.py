"""Reads a row trace into a workload table; everything is checked before anything runs."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from pathlib import Path

import numpy as np

from engine.core.errors import ConfigError, InputError
from sim.workloads.arrivals import draw_arrivals
from sim.workloads.formats import TraceFormat, arrival_time_ns, detect_format
from sim.workloads.table import HASH_SPACE, HashedPrefixes, Workload
from sim.workloads.text import Row, field, read_rows, token_count


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How to read a trace.

    `rate` is the arrival rate of a trace without arrival times, drawn from process `arrival`
    with `burstiness`; a trace with times is sped up or slowed down to it. `hash_block_tokens` is
    the block size of the hash ids of a plain trace.
    """

    num_requests: int | None = None
    rate: float | None = None
    arrival: str = "poisson"
    burstiness: float = 1.0
    seed: int = 0
    chars_per_token: int = 4
    hash_block_tokens: int = 16

    def __post_init__(self) -> None:
        for option in ("chars_per_token", "hash_block_tokens"):
            if getattr(self, option) < 1:
                raise ConfigError(option, getattr(self, option), "must be at least 1")
        if self.num_requests is not None and self.num_requests < 1:
            raise ConfigError("num_requests", self.num_requests, "must be at least 1")


class _Columns:
    """The growing columns of one trace."""

    def __init__(self, path: Path, known: TraceFormat, options: TraceOptions) -> None:
        self._path, self._format, self._options = path, known, options
        self.arrival_ns = array("q")
        self.prompt_tokens = array("q")
        self.output_tokens = array("q")
        self.request_ids: list[str] = []
        self._seen: set[str] = set()
        self.hash_ids = array("q")
        self.offsets = array("q", [0])
        self.block_tokens = known.hash_block
        if known.chars:
            self.block_tokens = max(1, known.hash_block // options.chars_per_token)
        self._max_hash_id = HASH_SPACE // self.block_tokens - 1 if self.block_tokens else 0

    def append(self, row: Row) -> None:
        """Checks one row and adds it."""
        known, path = self._format, self._path
        for column in known.required:
            field(path, row, column)
        prompt_units = token_count(path, row, known.prompt)
        output_units = token_count(path, row, known.output)
        if known.total and token_count(path, row, known.total) != prompt_units + output_units:
            raise InputError(
                f"{path}:{row.line}: {known.total}={row.fields[known.total]!r}:"
                f" is not {prompt_units} + {output_units}"
            )
        if known.arrival:
            self._append_arrival(row)
        if known.request_id:
            self._append_id(row, known.request_id)
        if known.hash_block:
            self._append_hashes(row, -(-prompt_units // known.hash_block))
        if known.chars:
            per_token = self._options.chars_per_token
            whole, rest = divmod(prompt_units, known.hash_block)
            prompt_units = whole * self.block_tokens
            prompt_units += min(self.block_tokens, -(-rest // per_token))
            output_units = -(-output_units // per_token)
        self.prompt_tokens.append(prompt_units)
        self.output_tokens.append(output_units)

    def _append_arrival(self, row: Row) -> None:
        time = arrival_time_ns(self._path, row, self._format)
        if self.arrival_ns and time < self.arrival_ns[-1]:
            column = str(self._format.arrival)
            raise InputError(
                f"{self._path}:{row.line}: {column}={row.fields[column]!r}: lies before the row"
                " above; arrivals must be sorted"
            )
        self.arrival_ns.append(time)

    def _append_id(self, row: Row, column: str) -> None:
        value = row.fields[column]
        if isinstance(value, Decimal) or not isinstance(value, str | int) or value == "":
            raise InputError(f"{self._path}:{row.line}: {column}={value!r}: must be an id")
        name = str(value)
        if name in self._seen:
            raise InputError(f"{self._path}:{row.line}: {column}={name!r}: occurs twice")
        self._seen.add(name)
        self.request_ids.append(name)

    def _append_hashes(self, row: Row, num_blocks: int) -> None:
        value = row.fields["hash_ids"]
        ids = _id_list(value)
        where = f"{self._path}:{row.line}: hash_ids"
        if ids is None:
            raise InputError(f"{where}={str(value)[:60]!r}: must be a list of whole numbers")
        if len(ids) != num_blocks:
            raise InputError(
                f"{where}: has {len(ids)} ids, but the prompt has {num_blocks} blocks of"
                f" {self._format.hash_block}"
            )
        if min(ids) < 0 or max(ids) > self._max_hash_id:
            bad = min(ids) if min(ids) < 0 else max(ids)
            raise InputError(f"{where}: {bad} is not within 0 to {self._max_hash_id}")
        self.hash_ids.extend(ids)
        self.offsets.append(len(self.hash_ids))


def _id_list(value: object) -> list[int] | None:
    if isinstance(value, str):
        try:
            return [int(part) for part in value.split()]
        except ValueError:
            return None
    if not isinstance(value, list):
        return None
    plain = all(isinstance(part, int) and not isinstance(part, bool) for part in value)
    return value if plain else None


def read_trace(path: Path, options: TraceOptions) -> Workload:
    """Reads and checks a trace of any known row format.

    Raises:
        InputError: the file is unreadable or a row is wrong; the message names file, line, value.
        ConfigError: the trace has no arrival times and no rate was given.
    """
    rows = read_rows(path)
    first = next(rows)
    known = detect_format(path, first, options.hash_block_tokens)
    columns = _Columns(path, known, options)
    limit = options.num_requests
    for row in chain((first,), rows):
        columns.append(row)
        if limit is not None and len(columns.prompt_tokens) == limit:
            break
    workload = Workload(
        path.name,
        _arrivals(path, known, columns, options),
        columns.prompt_tokens,
        columns.output_tokens,
        request_ids=columns.request_ids or None,
    )
    if known.hash_block:
        workload.hashed = HashedPrefixes(columns.block_tokens, columns.hash_ids, columns.offsets)
    workload.parameters = {"trace": path.name, "format": known.name}
    if known.chars:
        workload.parameters["chars_per_token"] = options.chars_per_token
    if not known.arrival:
        workload.parameters.update(
            arrival=options.arrival, rate=options.rate, burstiness=options.burstiness
        )
    elif options.rate is not None:
        _scale_to_rate(workload, options.rate)
    return workload


def _arrivals(
    path: Path, known: TraceFormat, columns: _Columns, options: TraceOptions
) -> array[int]:
    if known.arrival:
        # Whatever clock the trace uses, the run starts with its first request.
        first_ns = columns.arrival_ns[0]
        return array("q", [time - first_ns for time in columns.arrival_ns])
    if options.rate is None:
        raise ConfigError("rate", None, f"{path.name} has no arrival times, so a rate is needed")
    rng = np.random.default_rng(options.seed)
    count = len(columns.prompt_tokens)
    return draw_arrivals(options.arrival, options.rate, count, rng, options.burstiness)


def _scale_to_rate(workload: Workload, rate: float) -> None:
    own = workload.mean_rate()
    if own is None:
        raise ConfigError("rate", rate, f"{workload.name} spans no time, so it has no rate")
    workload.scale_arrivals(rate / own)


def read_lengths(path: Path) -> Workload:
    """Lengths of any trace, for empirical distributions; arrivals are without meaning."""
    return read_trace(path, TraceOptions(rate=1.0))
