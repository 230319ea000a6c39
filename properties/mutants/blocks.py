"""Defects of pool, block manager and prefix index: laws B, K, W and V."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.core.block_manager import NO_HITS, BlockManager, Hits
from engine.core.block_pool import BlockPool
from engine.core.config import KernelConfig
from engine.core.decode_set import DecodeSet
from engine.core.free_list import FreeList
from engine.core.hashing import ChainNode, ExtraKeys, PrefixIndex
from engine.core.policies import MixedPolicy, PrefillFirstPolicy
from engine.core.sequence import Sequence
from engine.core.state import KernelState
from engine.core.step import Step
from engine.core.tokens import Content
from properties.mutants.planting import Mutant, Planted, find_hits


class _FreesSharedPool(BlockPool):
    def release(self, table: Seq[int]) -> None:
        super().release(table)
        for block_id in table:
            if self._ref_counts[block_id] == 1:
                self._loose.append(block_id)
                self.num_free += 1


class FreesSharedBlock(Planted):
    """A released block goes to the free queue although one holder is left."""

    pool_class = _FreesSharedPool


class _QueuesTwicePool(BlockPool):
    def release(self, table: Seq[int]) -> None:
        super().release(table)
        if table and self._ref_counts[table[0]] == 0:
            self._loose.append(table[0])


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
        if sequence.table and self.missing(sequence, num_tokens) == 1:
            sequence.table.append(sequence.table[0])
            return (sequence.table[0],)
        return super().extend(sequence, num_tokens)


class AppendsFirstBlockAgain(Planted):
    """A growing table gets its own first block once more."""

    manager_class = _AppendsFirstManager


class _ReservesAllManager(BlockManager):
    def admit(self, sequence: Sequence, hits: Hits, num_tokens: int) -> None:
        super().admit(sequence, hits, max(num_tokens, sequence.num_known))


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
        if state.waiting and step.budget and pool.num_free and not state.waiting[0].table:
            state.waiting[0].table.extend(pool.take(1))
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


class _EagerManager(BlockManager):
    def admit(self, sequence: Sequence, hits: Hits, num_tokens: int) -> None:
        super().admit(sequence, hits, num_tokens)
        self.seal(sequence, num_tokens)


class RegistersAtAllocation(Planted):
    """`prefill_first` registers a prompt's blocks when it allocates them, not once computed."""

    manager_class = _EagerManager


class _UntypedIndex(PrefixIndex):
    def root(self, extra_keys: ExtraKeys) -> ChainNode:
        return super().root(tuple(("", value) for _, value in extra_keys))


class MixesExtraKeys(Planted):
    """A salt and an adapter of the same name share a prefix cache."""

    index_class = _UntypedIndex


class _OneBlockPerKeyPool(BlockPool):
    def register(self, block_id: int, node: ChainNode) -> None:
        node.blocks = ()
        super().register(block_id, node)

    def unregister(self, block_id: int) -> None:
        node = self._nodes[block_id]
        if node is not None:
            self._nodes[block_id] = None
            node.blocks = tuple([copy for copy in node.blocks if copy != block_id])
            self._index.unpin(node)


class LosesTwin(Planted):
    """One key maps to one block: the newest copy replaces the others (nano-vLLM's bb823b3)."""

    pool_class = _OneBlockPerKeyPool


class _TrustsHashIndex(PrefixIndex):
    def intern(self, parent: ChainNode, content: Content) -> ChainNode:
        node = super().intern(parent, content)
        if node.collision is not None and not node.blocks and node.pins == 0:
            parent.pins -= 1
            self._buckets[node.hash] = node.collision
            return node.collision
        return node


class TrustsHash(Planted):
    """A hit compares the hash and not the tokens."""

    index_class = _TrustsHashIndex


class _TakesBeforePinManager(BlockManager):
    def admit(self, sequence: Sequence, hits: Hits, num_tokens: int) -> None:
        wanted = self.blocks_for(num_tokens) - len(hits.block_ids)
        fresh = self.pool.take(wanted)
        for block_id in hits.block_ids:
            self.pool._ref_counts[block_id] += 1
        sequence.table = [*hits.block_ids, *fresh]
        sequence.num_computed = sequence.num_sealed = 0
        sequence.num_computed = len(hits.block_ids) * self.block_size
        sequence.num_sealed = len(hits.block_ids)


class TakesBeforePin(Planted):
    """New blocks are taken between the lookup and the pinning of its hits."""

    manager_class = _TakesBeforePinManager


class _StalePool(BlockPool):
    def unregister(self, block_id: int) -> None:
        self._nodes[block_id] = None


class KeepsStaleEntry(Planted):
    """A block that is handed out for new content can still be found under its old key."""

    pool_class = _StalePool


class _HitsLastManager(BlockManager):
    def lookup(self, sequence: Sequence) -> Hits:
        if not self.caching:
            return NO_HITS
        return find_hits(self, sequence, sequence.num_known // self.block_size)


class HitsLastBlock(Planted):
    """A prompt of whole blocks may be hit completely, so nothing is left to compute."""

    manager_class = _HitsLastManager


class _SkipsFirstManager(BlockManager):
    def lookup(self, sequence: Sequence) -> Hits:
        hits = super().lookup(sequence)
        return hits._replace(block_ids=hits.block_ids[1:]) if len(hits.block_ids) > 1 else hits


class HitsWithoutFirstBlock(Planted):
    """A lookup returns the blocks of a chain without its first one."""

    manager_class = _SkipsFirstManager


class _NewestFirstList(FreeList):
    def pop(self) -> int:
        block_id = self._older[0] - 1
        self.remove(block_id)
        return block_id


class _NewestFirstPool(BlockPool):
    def __init__(
        self, num_blocks: int, index: PrefixIndex, unregistered_first: bool, serve_newest: bool
    ) -> None:
        super().__init__(num_blocks, index, unregistered_first, serve_newest)
        self._released = _NewestFirstList()


class EvictsNewest(Planted):
    """The most recently freed block is evicted first."""

    pool_class = _NewestFirstPool


class _CountsFirstPolicy(MixedPolicy):
    def _admit_next(self, state: KernelState, step: Step) -> bool:
        before = state.waiting[0] if state.waiting else None
        hits = state.manager.lookup(before) if before else NO_HITS
        for block_id in hits.block_ids:
            state.manager.pool.share(block_id)
        admitted = super()._admit_next(state, step)
        if admitted:
            for block_id in hits.block_ids:
                state.manager.pool._ref_counts[block_id] -= 1
        return admitted


class CountsBeforeCapacity(Planted):
    """Hits get their reference before the capacity test and keep it when the test fails."""

    mixed_class = _CountsFirstPolicy


class _HandsOutTwicePool(BlockPool):
    def take(self, count: int) -> list[int]:
        taken = super().take(count)
        if taken:
            self._loose.append(taken[0])
            self.num_free += 1
        return taken


class HandsOutTwice(Planted):
    """A block that was handed out stays at the front of the free queue."""

    pool_class = _HandsOutTwicePool


class _RecomputesManager(BlockManager):
    def admit(self, sequence: Sequence, hits: Hits, num_tokens: int) -> None:
        super().admit(sequence, hits, num_tokens)
        if hits.block_ids:
            sequence.num_computed -= 1


class RecomputesIntoHit(Planted):
    """The last token of a hit block is computed again, in place."""

    manager_class = _RecomputesManager


class _RepeatsStep(Step):
    __slots__ = ()

    def book(self, state: KernelState) -> list[Sequence]:
        ending = super().book(state)
        for sequence, count in self.chunks:
            if count > 1 and sequence.num_computed < sequence.num_known:
                sequence.num_computed -= 1
        return ending


class RepeatsChunkToken(Planted):
    """A continued chunk computes the last token of the one before again."""

    step_class = _RepeatsStep


class _NeverHitsManager(BlockManager):
    def lookup(self, sequence: Sequence) -> Hits:
        return NO_HITS


class NeverHits(Planted):
    """Every lookup is a miss."""

    manager_class = _NeverHitsManager


class _PromptHitsManager(BlockManager):
    def lookup(self, sequence: Sequence) -> Hits:
        hits = super().lookup(sequence)
        most = len(sequence.prompt) // self.block_size
        if len(hits.block_ids) <= most:
            return hits
        return find_hits(self, sequence, most)


class HitsPromptOnly(Planted):
    """A preempted request does not hit the blocks of its generated tokens."""

    manager_class = _PromptHitsManager


class _BoundaryIndexPool(BlockPool):
    def register(self, block_id: int, node: ChainNode) -> None:
        if self._served == 0 and node.blocks:
            return
        super().register(block_id, node)


class SecondCopyUnregistered(Planted):
    """A second copy of a block's content is not registered."""

    pool_class = _BoundaryIndexPool


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
        self._shared_row[:] = sequence.table
        sequence.table = self._shared_row


class SharesTableRow(Planted):
    """Block tables are views of one mutable row."""

    manager_class = _ViewManager


MUTANTS = (
    Mutant("B1", FreesSharedBlock, "own"),
    Mutant("B2", QueuesBlockTwice, "C67"),
    Mutant("B3", ForgetsReference, "C71"),
    Mutant("B4", LeaksFirstBlock, "own"),
    Mutant("B5", AppendsFirstBlockAgain, "own"),
    Mutant("B6", TakesWholePromptForChunk, "own", "mixed"),
    Mutant("B7", AppendsAtBlockMultiple, "C14"),
    Mutant("W4", AppendsAtBlockMultiple, "C14"),
    Mutant("B8", KeepsPartialAllocation, "Dynamo #11016", "mixed"),
    Mutant("B11", ReleasesHeadFirst, "own"),
    Mutant("L5", LeaksFirstBlock, "own"),
    Mutant("K1", RegistersAtAllocation, "nano-vLLM 2f21442", "prefill_first"),
    Mutant("V1", RegistersAtAllocation, "nano-vLLM 2f21442", "prefill_first"),
    Mutant("E1", RegistersAtAllocation, "nano-vLLM 2f21442", "prefill_first"),
    Mutant("K3", LosesTwin, "B09, C42, nano-vLLM bb823b3"),
    Mutant("K4", TrustsHash, "C38"),
    Mutant("K11", TrustsHash, "C38"),
    Mutant("K5", TakesBeforePin, "vLLM #37164"),
    Mutant("K6", KeepsStaleEntry, "C40, C43, nano-vLLM 2f21442"),
    Mutant("K7", HitsLastBlock, "C22, nano-vLLM 2f21442"),
    Mutant("K8", HitsWithoutFirstBlock, "own"),
    Mutant("K9", EvictsNewest, "own"),
    Mutant("K10", CountsBeforeCapacity, "C19", "mixed"),
    Mutant("W1", HandsOutTwice, "own"),
    Mutant("W2", RecomputesIntoHit, "C22"),
    Mutant("W3", RecomputesIntoHit, "C22"),
    Mutant("W5", RepeatsChunkToken, "own"),
    Mutant("E5", RepeatsChunkToken, "own"),
    Mutant("T1", NeverHits, "own"),
    Mutant("T1", HitsPromptOnly, "own"),
    Mutant("T1", SecondCopyUnregistered, "C42", "mixed"),
    Mutant("B8", ForgetsFreeHits, "C20", "prefill_first"),
    Mutant("B5", SharesTableRow, "C74"),
)
