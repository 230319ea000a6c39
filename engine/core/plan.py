"""What crosses the kernel's boundary: the plan of one step and the outcome of its commit.

Plans are columnar. The decode part is one object that consecutive plans share for as long as the
same sequences decode; per-entry objects are made on demand only.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.core.request import RequestId
from engine.core.tokens import Prompt


class Entry(NamedTuple):
    """One member of a step's batch."""

    request_id: RequestId
    first_position: int  # tokens whose KV was valid before this step
    num_tokens: int
    samples: bool  # the step ends with this entry's known tokens, so one token is sampled
    is_decode: bool


class NewBlocks(NamedTuple):
    """Blocks that a table gained in this step; `first_index` is the place of the first one."""

    request_id: RequestId
    first_index: int
    block_ids: tuple[int, ...]


class Admission(NamedTuple):
    """A request that left the waiting queue with fresh blocks, new or after a preemption."""

    request_id: RequestId
    hit_tokens: int
    hit_blocks_used: int
    hit_blocks_free: int
    hit_blocks_same_step: int
    resumed: bool


class KvCopy(NamedTuple):
    """A block of KV that a step copies between the pool and the host tier before it computes."""

    block_id: int
    host_slot: int
    to_host: bool


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The sequences that decode, in running order; row i computes one token.

    At a plan's `clock`, row i computes position `base_positions[i] + clock`. `generation` grows
    whenever the rows change, so a runner that knows it needs deltas only.
    """

    generation: int
    request_ids: tuple[RequestId, ...]
    base_positions: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.request_ids)


NO_DECODES = DecodeBatch(0, (), ())


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a prompt (or of a recomputation) that this step computes.

    `row` is the entry's place in the batch. The ids of its tokens are read on demand, up to the
    commit of the plan.
    """

    request_id: RequestId
    first_position: int
    num_tokens: int
    row: int
    samples: bool
    prompt: Prompt
    outputs: array[int]

    @property
    def token_ids(self) -> array[int]:
        """Ids at positions first_position .. first_position + num_tokens - 1."""
        start, stop = self.first_position, self.first_position + self.num_tokens
        known = len(self.prompt)
        tokens = self.prompt.tokens(start, min(stop, known)) if start < known else array("q")
        if stop > known:
            tokens.extend(self.outputs[max(0, start - known) : stop - known])
        return tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything that one step does; the only thing a runner, a simulator or the log sees.

    `copies` are done in their order and before the step computes: one may read what another wrote.
    """

    step: int
    clock: int
    decode: DecodeBatch
    chunks: tuple[Chunk, ...]
    new_blocks: tuple[NewBlocks, ...]
    admitted: tuple[Admission, ...]
    preempted: tuple[RequestId, ...]
    num_tokens: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    copies: tuple[KvCopy, ...] = ()

    @property
    def num_entries(self) -> int:
        """Size of the batch."""
        return len(self.decode.request_ids) + len(self.chunks)

    @property
    def is_pure_decode(self) -> bool:
        """True if every entry is a decode."""
        return not self.chunks

    @property
    def entries(self) -> Iterator[Entry]:
        """The batch, entry by entry, in batch order."""
        decode, chunks = self.decode, self.chunks
        next_chunk = 0
        row = 0
        for request_id, base in zip(decode.request_ids, decode.base_positions, strict=True):
            while next_chunk < len(chunks) and chunks[next_chunk].row == row:
                yield _chunk_entry(chunks[next_chunk])
                next_chunk += 1
                row += 1
            yield Entry(request_id, base + self.clock, 1, True, True)
            row += 1
        for chunk in chunks[next_chunk:]:
            yield _chunk_entry(chunk)

    @property
    def sampled_ids(self) -> Sequence[RequestId]:
        """Ids of the entries that sample a token, in batch order: `commit` wants one token each."""
        if not self.chunks:
            return self.decode.request_ids
        ids, passed = [*self.decode.request_ids], 0
        for chunk in self.chunks:
            if chunk.samples:
                ids.insert(chunk.row - passed, chunk.request_id)
            else:
                passed += 1
        return tuple(ids)


def _chunk_entry(chunk: Chunk) -> Entry:
    return Entry(chunk.request_id, chunk.first_position, chunk.num_tokens, chunk.samples, False)


class Finished(NamedTuple):
    """A request that ended; `reason` is `stop`, `length`, `abort` or `error`."""

    request_id: RequestId
    reason: str
    output_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What the commit of a step changed.

    `sampled` are the ids that received a token, aligned with `token_ids`; a request whose abort
    or early end voided its entry is left out. `finished` is in batch order.
    """

    step: int
    sampled: Sequence[RequestId]
    token_ids: Sequence[int]
    finished: tuple[Finished, ...]


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """A stretch of equal pure decode steps that was committed in one go.

    `new_blocks` holds (offset of the step within the run, blocks); `outcome` belongs to the last
    step, the only one that may finish requests.
    """

    first_step: int
    num_steps: int
    decode: DecodeBatch
    new_blocks: tuple[tuple[int, NewBlocks], ...]
    num_free_blocks: int
    outcome: StepOutcome
