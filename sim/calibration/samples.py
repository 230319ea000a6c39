"""Step logs as columns: the work of every step, how long it took, and the gap behind it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import InputError
from engine.steplog.api import AddRecord, ExpandedRecord, LogHeader, StepRecord
from engine.steplog.vllm_recording import open_log
from sim.cost.features import StepFeatures
from sim.cost.work import WORK_COLUMNS, Floats, next_recent, work_row


@dataclass(frozen=True, slots=True)
class Samples:
    """The steps of one log.

    `work` has one column per name of `WORK_COLUMNS`. `gap_ns` is the host time up to the next
    step, NaN where the engine was idle or the log ends; `num_added` and `added_tokens` are the
    requests that it took in during that gap.
    """

    name: str
    header: LogHeader
    work: Floats
    duration_ns: Floats
    gap_ns: Floats
    num_finished: Floats
    num_added: Floats
    added_tokens: Floats
    start_ns: Floats
    host_ns: Floats
    graph_buckets: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.duration_ns)

    def column(self, name: str) -> Floats:
        """One column of `work`."""
        column: Floats = self.work[:, WORK_COLUMNS.index(name)]
        return column

    @property
    def is_mixed(self) -> NDArray[np.bool_]:
        """Steps with prompt chunks; the others are pure decode."""
        mixed: NDArray[np.bool_] = self.column("num_chunks") > 0
        return mixed


def read_samples(path: str | Path) -> Samples:
    """The steps of a log or a recording.

    Raises:
        InputError: not a log, damaged, or without steps.
    """
    log = open_log(path)
    if log.header.num_replicas != 1:
        raise InputError(f"{path}: {log.header.num_replicas} replicas: calibrate on one engine")
    samples = collect(str(Path(path).name), log.header, log.expanded())
    if not len(samples):
        raise InputError(f"{path}: holds no step")
    return samples


def collect(name: str, header: LogHeader, records: Iterable[ExpandedRecord]) -> Samples:
    """Columns of the committed steps among `records`."""
    collector = _Collector(header)
    for record in records:
        if isinstance(record, AddRecord):
            collector.add(record)
        elif isinstance(record, StepRecord) and not record.discarded:
            collector.step(record)
    columns = {key: np.array(values, dtype=np.float64) for key, values in collector.columns.items()}
    work = np.array(collector.work, dtype=np.float64).reshape(-1, len(WORK_COLUMNS))
    return Samples(
        name=name, header=header, work=work, graph_buckets=tuple(sorted(collector.buckets)),
        **columns,
    )  # fmt: skip


def record_features(record: StepRecord, header: LogHeader) -> StepFeatures:
    """What a cost model may know about a recorded step."""
    contexts = [position + 1 for position in record.decode_positions]
    chunks = tuple([(chunk.first_position, chunk.num_tokens) for chunk in record.chunks])
    shared = 0
    kernel = header.kernel
    if kernel.enable_prefix_caching and "free_blocks" not in header.omits:
        size = kernel.block_size
        ends = contexts + [first + num_tokens for first, num_tokens in chunks]
        if len(ends) == record.num_running:
            # All holders are in the batch, so the blocks in use are those of the batch.
            held = sum([-(-end // size) for end in ends])
            shared = max(0, held - (kernel.num_blocks - record.num_free_blocks)) * size
    sampled = len(contexts) + sum([chunk.samples for chunk in record.chunks])
    return StepFeatures(len(contexts), sum(contexts), chunks, sampled, shared)


class _Collector:
    def __init__(self, header: LogHeader) -> None:
        self._header = header
        self.work: list[list[float]] = []
        names = ("duration_ns", "gap_ns", "num_finished", "num_added", "added_tokens", "start_ns",
                 "host_ns")  # fmt: skip
        self.columns: dict[str, list[float]] = {key: [] for key in names}
        self.buckets: set[int] = set()
        self._recent = 0.0
        self._live = 0
        self._num_added = self._added_tokens = 0

    def add(self, record: AddRecord) -> None:
        self._live += 1
        self._num_added += 1
        self._added_tokens += len(record.request.prompt)

    def step(self, record: StepRecord) -> None:
        columns = self.columns
        if columns["start_ns"]:
            end_ns = columns["start_ns"][-1] + columns["duration_ns"][-1]
            columns["num_added"][-1] = self._num_added
            columns["added_tokens"][-1] = self._added_tokens
            if self._live > self._num_added:  # else the engine had nothing to do for a while
                columns["gap_ns"][-1] = record.start_ns - end_ns
        self._num_added = self._added_tokens = 0
        features = record_features(record, self._header)
        self.work.append(work_row(features, self._recent))
        self._recent = next_recent(self._recent, features.num_chunk_tokens)
        self._live -= len(record.finished)
        row: dict[str, Any] = {
            "duration_ns": record.duration_ns,
            "gap_ns": np.nan,
            "num_finished": len(record.finished),
            "num_added": 0,
            "added_tokens": 0,
            "start_ns": record.start_ns,
            "host_ns": np.nan if record.host_ns is None else record.host_ns,
        }
        for key, value in row.items():
            columns[key].append(value)
        if record.graph_bucket is not None:
            self.buckets.add(record.graph_bucket)
