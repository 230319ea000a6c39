"""Records of the step log in memory, and the compact coding of token and block ids.

A pure decode stretch is one `DecodeStretch`, in the file as well as in memory; `expand` turns it
into the `StepRecord`s of its steps, the form that diffs and replays compare.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.core.config import KernelConfig
from engine.core.plan import Admission, Entry, NewBlocks
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
        row_of = {request_id: row for row, request_id in enumerate(self.decode_ids)}
        free_blocks = self.num_free_blocks
        start_ns = self.start_ns
        next_block = 0
        last = self.num_steps - 1
        for offset, duration_ns in enumerate(self.durations_ns):
            start_ns += self.gaps_ns[offset]
            taken: list[NewBlocks] = []
            while next_block < len(self.new_blocks) and self.new_blocks[next_block][0] == offset:
                _, request_id, block_id = self.new_blocks[next_block]
                place = (self.positions[row_of[request_id]] + offset) // block_size
                taken.append(NewBlocks(request_id, place, (block_id,)))
                next_block += 1
            free_blocks -= len(taken) if offset else 0
            yield StepRecord(
                step=self.first_step + offset,
                start_ns=start_ns,
                duration_ns=duration_ns,
                decode_ids=self.decode_ids,
                decode_positions=tuple(position + offset for position in self.positions),
                new_blocks=tuple(taken),
                num_free_blocks=free_blocks,
                num_running=self.num_running,
                num_waiting=self.num_waiting,
                token_ids=_column(self.token_ids, offset),
                finished=self.finished if offset == last else (),
                host_ns=None if self.host_ns is None else self.host_ns[offset],
                device_ns=None if self.device_ns is None else self.device_ns[offset],
                graph_bucket=self.graph_bucket,
                open_plans=self.open_plans,
                replica=self.replica,
            )
            start_ns += duration_ns


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


# In the file a sequence of ids is a list of items: an id, or [first id, length] for ids that
# count upwards. Shorter runs stay explicit because the pair would not be shorter.
SHORTEST_RUN = 3
IdItem = int | list[int]


def encode_ids(ids: Sequence[int]) -> list[IdItem]:
    """Compact form of ids; equal ids give equal forms."""
    if isinstance(ids, range) and ids.step == 1 and len(ids) >= SHORTEST_RUN:
        return [[ids.start, len(ids)]]
    items: list[IdItem] = []
    begin, count = 0, len(ids)
    while begin < count:
        end = begin + 1
        while end < count and ids[end] == ids[end - 1] + 1:
            end += 1
        if end - begin >= SHORTEST_RUN:
            items.append([ids[begin], end - begin])
        else:
            items.extend(ids[begin:end])
        begin = end
    return items


def encode_prompt(prompt: Prompt) -> list[IdItem]:
    """Compact form of a prompt; lazy ranges are not materialised."""
    return [item for span in prompt.spans for item in encode_ids(span)]


def decode_ids(items: Sequence[object]) -> Prompt:
    """Inverse of `encode_ids` and `encode_prompt`; runs stay lazy.

    Raises:
        ValueError: an item is neither an int64 id nor a run of them.
    """
    spans: list[range | array[int]] = []
    explicit = array("q")
    for item in items:
        if isinstance(item, int) and not isinstance(item, bool):
            _check_int64(item)
            explicit.append(item)
            continue
        first, length = _run(item)
        if explicit:
            spans.append(explicit)
            explicit = array("q")
        spans.append(range(first, first + length))
    spans.append(explicit)
    return Prompt.from_spans(spans)


def _run(item: object) -> tuple[int, int]:
    if (
        not isinstance(item, list)
        or len(item) != 2
        or not all(isinstance(part, int) and not isinstance(part, bool) for part in item)
        or item[1] < 1
    ):
        raise ValueError(f"{item!r} is neither an id nor a [first, length] pair")
    _check_int64(item[0])
    _check_int64(item[0] + item[1] - 1)
    return item[0], item[1]


def _check_int64(value: int) -> None:
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"id {value} does not fit into 64 bits")
