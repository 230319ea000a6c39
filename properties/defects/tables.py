"""Defects of pool and block tables: laws B and W."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.core.block_manager import BlockManager, Hits
from engine.core.block_pool import BlockPool
from engine.core.config import KernelConfig
from engine.core.decode_set import DecodeSet
from engine.core.policies.mixed import MixedPolicy
from engine.core.policies.prefill_first import PrefillFirstPolicy
from engine.core.sequence import Sequence
from engine.core.state import KernelState
from engine.core.step import Step
from properties.defects.planting import Mutant, Planted


class _FreesSharedPool(BlockPool):
    def release(self, table: Seq[int]) -> None:
        super().release(table)
        for block_id in table:
            if self._ref_counts[block_id] == 1:
                self._free_uncached.append(block_id)
                self.num_free += 1


class FreesSharedBlock(Planted):
    """A released block goes to the free queue although one holder is left."""

    pool_class = _FreesSharedPool


class _QueuesTwicePool(BlockPool):
    def release(self, table: Seq[int]) -> None:
        super().release(table)
        if table and self._ref_counts[table[0]] == 0:
            self._free_uncached.append(table[0])


class QueuesBlockTwice(Planted):
    """A freed block enters the free queue twice."""

    pool_class = _QueuesTwicePool


class _ForgetsReferencePool(BlockPool):
    def share(self, block_id: int) -> None:
        if self._ref_counts[block_id] == 0:
            super().share(block_id)


class ForgetsReference(Planted):
    """A hit on a block in use adds no reference."""

    pool_class = _ForgetsReferencePool


class _LeaksFirstPool(BlockPool):
    def release(self, table: Seq[int]) -> None:
        super().release(table[1:] if len(table) > 1 else table)


class LeaksFirstBlock(Planted):
    """A released table keeps its first block for ever."""

    pool_class = _LeaksFirstPool


class _AppendsFirstManager(BlockManager):
    def extend(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        if sequence.block_table and self.missing(sequence, num_tokens) == 1:
            sequence.block_table.append(sequence.block_table[0])
            return (sequence.block_table[0],)
        return super().extend(sequence, num_tokens)


class AppendsFirstBlockAgain(Planted):
    """A growing table gets its own first block once more."""

    manager_class = _AppendsFirstManager


class _ReservesAllManager(BlockManager):
    def admit(self, sequence: Sequence, hits: Hits, num_tokens: int) -> None:
        super().admit(sequence, hits, max(num_tokens, sequence.num_tokens))


class TakesWholePromptForChunk(Planted):
    """`mixed` takes the blocks of a whole prompt when it computes the first chunk."""

    manager_class = _ReservesAllManager


class _OffByOneDecodes(DecodeSet):
    def due(self, remainder: int) -> list[Sequence]:
        return super().due(0 if remainder == 1 else remainder)


class AppendsAtBlockMultiple(Planted):
    """The append rule looks at length mod B = 0 and not at 1."""

    decodes_class = _OffByOneDecodes


class _KeepsPartialPolicy(MixedPolicy):
    def _admit_next(self, state: KernelState, step: Step) -> bool:
        if super()._admit_next(state, step):
            return True
        pool = state.manager.pool
        if (
            state.waiting
            and step.token_budget
            and pool.num_free
            and not state.waiting[0].block_table
        ):
            state.waiting[0].block_table.extend(pool.take(1))
        return False


class KeepsPartialAllocation(Planted):
    """A request that does not fit keeps the blocks that it could get while it waits."""

    mixed_class = _KeepsPartialPolicy


class _SilentPool(BlockPool):
    def release(self, table: Seq[int]) -> None:
        super().release([block_id for block_id in table if self._ref_counts[block_id] > 0])


class IgnoresDoubleFree(Planted):
    """Freeing a free block goes unnoticed."""

    pool_class = _SilentPool


class _ForwardPool(BlockPool):
    def release(self, table: Seq[int]) -> None:
        super().release(table[::-1])


class ReleasesHeadFirst(Planted):
    """A table is released from its first block to its last."""

    pool_class = _ForwardPool


class _HandsOutTwicePool(BlockPool):
    def take(self, count: int) -> list[int]:
        taken = super().take(count)
        if taken:
            self._free_uncached.append(taken[0])
            self.num_free += 1
        return taken


class HandsOutTwice(Planted):
    """A block that was handed out stays at the front of the free queue."""

    pool_class = _HandsOutTwicePool


class _RecomputesManager(BlockManager):
    def admit(self, sequence: Sequence, hits: Hits, num_tokens: int) -> None:
        super().admit(sequence, hits, num_tokens)
        if hits.block_ids:
            sequence.num_computed_tokens -= 1


class RecomputesIntoHit(Planted):
    """The last token of a hit block is computed again, in place."""

    manager_class = _RecomputesManager


class _RepeatsStep(Step):
    __slots__ = ()

    def book(self, state: KernelState) -> list[Sequence]:
        ending = super().book(state)
        for sequence, count in self.chunks:
            if count > 1 and sequence.num_computed_tokens < sequence.num_tokens:
                sequence.num_computed_tokens -= 1
        return ending


class RepeatsChunkToken(Planted):
    """A continued chunk computes the last token of the one before again."""

    step_class = _RepeatsStep


class _ShortCapacityPolicy(PrefillFirstPolicy):
    def _needed(self, state: KernelState, sequence: Sequence, hits: Hits) -> int:
        return super()._needed(state, sequence, hits) - hits.num_free


class ForgetsFreeHits(Planted):
    """The capacity test does not count hits that lie in the free queue."""

    prefill_first_class = _ShortCapacityPolicy


class _ViewManager(BlockManager):
    def __init__(self, config: KernelConfig, unregistered_first: bool, serve_newest: bool) -> None:
        super().__init__(config, unregistered_first, serve_newest)
        self._shared_row: list[int] = []

    def admit(self, sequence: Sequence, hits: Hits, num_tokens: int) -> None:
        super().admit(sequence, hits, num_tokens)
        # The table handed out is a view of one row that the next admission overwrites.
        self._shared_row[:] = sequence.block_table
        sequence.block_table = self._shared_row


class SharesTableRow(Planted):
    """Block tables are views of one mutable row."""

    manager_class = _ViewManager


MUTANTS = (
    Mutant("B1", FreesSharedBlock, "own"),
    Mutant("B2", QueuesBlockTwice, "BUG-C67"),
    Mutant("B3", ForgetsReference, "BUG-C71"),
    Mutant("B4", LeaksFirstBlock, "own"),
    Mutant("B5", AppendsFirstBlockAgain, "own"),
    Mutant("B6", TakesWholePromptForChunk, "own", "mixed"),
    Mutant("B7", AppendsAtBlockMultiple, "BUG-C14"),
    Mutant("W4", AppendsAtBlockMultiple, "BUG-C14"),
    Mutant("B8", KeepsPartialAllocation, "Dynamo #11016", "mixed"),
    Mutant("B11", ReleasesHeadFirst, "own"),
    Mutant("L5", LeaksFirstBlock, "own"),
    Mutant("W1", HandsOutTwice, "own"),
    Mutant("W2", RecomputesIntoHit, "BUG-C22"),
    Mutant("W3", RecomputesIntoHit, "BUG-C22"),
    Mutant("W5", RepeatsChunkToken, "own"),
    Mutant("E5", RepeatsChunkToken, "own"),
    Mutant("B8", ForgetsFreeHits, "BUG-C20", "prefill_first"),
    Mutant("B5", SharesTableRow, "BUG-C74"),
)
