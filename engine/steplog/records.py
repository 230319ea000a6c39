"""Records of the step log in memory.

A pure decode stretch is one `DecodeStretch`, in the file as well as in memory; `expand` turns it
into the `StepRecord`s of its steps, the form that diffs and replays compare.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from engine.core.config import KernelConfig
from engine.core.plan import Admission, Entry, NewBlocks, StepPlan
from engine.core.request import Request, RequestId
from engine.core.tokens import Prompt

FORMAT_NAME = "lockstep-steplog"
FORMAT_VERSION = 1
WRITERS = ("engine", "sim", "import")
# What an imported log may lack; a replay compares everything else.
OMITTABLE = (
    "blocks",  # block ids
    "hit_kinds",  # how many hit blocks were in use, free, or from the same step
    "preempted_order",  # preempted ids are a set
    "running",
    "waiting",
    "free_blocks",
    "finished",
)


def _installed_version() -> str:
    # Imported here because the package metadata are slow to load and only a header needs them.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lockstep-llm")
    except PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True, slots=True)
class LogHeader:
    """What a log says about its run.

    `outputs_in_adds`: every `add` carries the request's whole output, so that steps leave their
    sampled tokens out. `omits` names what the writer did not know (words of `OMITTABLE`).
    """

    writer: str
    kernel: KernelConfig
    options: Mapping[str, object] = field(default_factory=dict)
    model: Mapping[str, object] = field(default_factory=dict)
    hardware: Mapping[str, object] = field(default_factory=dict)
    seed: int | None = None
    num_replicas: int = 1
    outputs_in_adds: bool = False
    omits: tuple[str, ...] = ()
    lockstep_version: str = field(default_factory=_installed_version)


@dataclass(frozen=True, slots=True)
class AddRecord:
    """A request joined a kernel; `open_plans` counts the plans that were uncommitted then.

    `arrival_ns` is when the user sent it, `added_ns` when the kernel got it.
    """

    request: Request
    arrival_ns: int
    added_ns: int
    outputs: Prompt | None = None
    open_plans: int = 0
    replica: int = 0


@dataclass(frozen=True, slots=True)
class AbortRecord:
    """A request was aborted."""

    request_id: RequestId
    time_ns: int
    open_plans: int = 0
    replica: int = 0


class ChunkRecord(NamedTuple):
    """A prompt chunk of a step; `row` is its place in the batch."""

    row: int
    request_id: RequestId
    first_position: int
    num_tokens: int
    samples: bool


class FinishRecord(NamedTuple):
    """A request that ended in a step, and why."""

    request_id: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step.

    Counts of blocks and requests are those after scheduling, before the commit. `sampled` is None
    if every entry that ends its known tokens got a token; `token_ids` is aligned with it, and None
    if the log leaves tokens out.
    """

    step: int
    start_ns: int
    duration_ns: int
    decode_ids: tuple[RequestId, ...] = ()
    decode_positions: tuple[int, ...] = ()
    chunks: tuple[ChunkRecord, ...] = ()
    preempted: tuple[RequestId, ...] = ()
    admitted: tuple[Admission, ...] = ()
    new_blocks: tuple[NewBlocks, ...] = ()
    num_free_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
    token_ids: tuple[int, ...] | None = None
    sampled: tuple[RequestId, ...] | None = None
    finished: tuple[FinishRecord, ...] = ()
    discarded: bool = False
    host_ns: int | None = None
    device_ns: int | None = None
    graph_bucket: int | None = None
    open_plans: int = 0
    replica: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.decode_ids) + sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def entries(self) -> Iterator[Entry]:
        """The batch in batch order."""
        decodes = iter(zip(self.decode_ids, self.decode_positions, strict=True))
        row = 0
        for chunk in self.chunks:
            while row < chunk.row:
                request_id, position = next(decodes)
                yield Entry(request_id, position, 1, True, True)
                row += 1
            yield Entry(
                chunk.request_id, chunk.first_position, chunk.num_tokens, chunk.samples, False
            )
            row += 1
        for request_id, position in decodes:
            yield Entry(request_id, position, 1, True, True)

    @property
    def sampled_ids(self) -> tuple[RequestId, ...]:
        """Ids that received a token."""
        if self.sampled is not None:
            return self.sampled
        if not self.chunks:
            return self.decode_ids
        return tuple(entry.request_id for entry in self.entries if entry.samples)


@dataclass(frozen=True, slots=True)
class DecodeStretch:
    """Consecutive pure decode steps of the same rows; only the last may finish requests.

    Row i computes position `positions[i] + k` in step `first_step + k`. `gaps_ns[k]` is the time
    between the end of step k-1 of the stretch and the start of step k (0 for k = 0).
    `new_blocks` holds (offset of the step, request id, block id): each row takes one block at a
    time. `num_free_blocks` is the count after scheduling the first step.
    """

    first_step: int
    start_ns: int
    durations_ns: tuple[int, ...]
    gaps_ns: tuple[int, ...]
    decode_ids: tuple[RequestId, ...]
    positions: tuple[int, ...]
    new_blocks: tuple[tuple[int, RequestId, int], ...]
    num_free_blocks: int
    num_running: int
    num_waiting: int
    token_ids: tuple[Sequence[int], ...] | None  # per row
    finished: tuple[FinishRecord, ...] = ()
    host_ns: tuple[int, ...] | None = None
    device_ns: tuple[int, ...] | None = None
    graph_bucket: int | None = None
    open_plans: int = 0
    replica: int = 0

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return len(self.durations_ns)

    @property
    def end_ns(self) -> int:
        """End of the last step."""
        return self.start_ns + sum(self.durations_ns) + sum(self.gaps_ns)

    def steps(self, block_size: int) -> Iterator[StepRecord]:
        """The steps one by one."""
        start_ns = self.start_ns
        for offset, duration_ns in enumerate(self.durations_ns):
            start_ns += self.gaps_ns[offset]
            yield self.step_at(offset, block_size, start_ns)
            start_ns += duration_ns

    def step_at(self, offset: int, block_size: int, start_ns: int | None = None) -> StepRecord:
        """One of the steps; `start_ns` saves the summing of the durations before it."""
        if start_ns is None:
            before = sum(self.durations_ns[:offset]) + sum(self.gaps_ns[: offset + 1])
            start_ns = self.start_ns + before
        first = bisect_left(self.new_blocks, offset, key=itemgetter(0))
        behind = bisect_right(self.new_blocks, offset, lo=first, key=itemgetter(0))
        taken_before = bisect_right(self.new_blocks, 0, key=itemgetter(0))
        taken: list[NewBlocks] = []
        for _, request_id, block_id in self.new_blocks[first:behind]:
            position = self.positions[self.decode_ids.index(request_id)] + offset
            taken.append(NewBlocks(request_id, position // block_size, (block_id,)))
        last = offset == self.num_steps - 1
        return StepRecord(
            step=self.first_step + offset,
            start_ns=start_ns,
            duration_ns=self.durations_ns[offset],
            decode_ids=self.decode_ids,
            decode_positions=tuple([position + offset for position in self.positions]),
            new_blocks=tuple(taken),
            num_free_blocks=self.num_free_blocks - (behind - taken_before if offset else 0),
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            token_ids=_column(self.token_ids, offset),
            finished=self.finished if last else (),
            host_ns=None if self.host_ns is None else self.host_ns[offset],
            device_ns=None if self.device_ns is None else self.device_ns[offset],
            graph_bucket=self.graph_bucket,
            open_plans=self.open_plans,
            replica=self.replica,
        )


def step_of_plan(plan: StepPlan, start_ns: int = 0, duration_ns: int = 0) -> StepRecord:
    """The record of a plan, without its outcome."""
    clock = plan.clock
    return StepRecord(
        step=plan.step,
        start_ns=start_ns,
        duration_ns=duration_ns,
        decode_ids=plan.decode.request_ids,
        decode_positions=tuple([base + clock for base in plan.decode.base_positions]),
        chunks=tuple(
            ChunkRecord(c.row, c.request_id, c.first_position, c.num_tokens, c.samples)
            for c in plan.chunks
        ),
        preempted=plan.preempted,
        admitted=plan.admitted,
        new_blocks=plan.new_blocks,
        num_free_blocks=plan.num_free_blocks,
        num_running=plan.num_running,
        num_waiting=plan.num_waiting,
    )


Record = AddRecord | AbortRecord | StepRecord | DecodeStretch
ExpandedRecord = AddRecord | AbortRecord | StepRecord


def expand(records: Iterable[Record], block_size: int) -> Iterator[ExpandedRecord]:
    """Records with every stretch replaced by its steps."""
    for record in records:
        if isinstance(record, DecodeStretch):
            yield from record.steps(block_size)
        else:
            yield record


def _column(rows: tuple[Sequence[int], ...] | None, offset: int) -> tuple[int, ...] | None:
    return None if rows is None else tuple(row[offset] for row in rows)
