"""Defects of the prefix cache: laws K, V and LAW-T1."""

from __future__ import annotations

from engine.core.block_manager import NO_HITS, BlockManager, Hits
from engine.core.block_pool import BlockPool
from engine.core.free_list import FreeList
from engine.core.hashing import ChainNode, ExtraKeys, PrefixIndex
from engine.core.policies.mixed import MixedPolicy
from engine.core.sequence import Sequence
from engine.core.state import KernelState
from engine.core.step import Step
from engine.core.tokens import Content
from properties.defects.planting import Mutant, Planted, find_hits


class _EagerManager(BlockManager):
    def admit(self, sequence: Sequence, hits: Hits, num_tokens: int) -> None:
        super().admit(sequence, hits, num_tokens)
        self.cache_full_blocks(sequence, num_tokens)


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
            self._index.dereference(node)


class LosesTwin(Planted):
    """One key maps to one block: the newest copy replaces the others (nano-vLLM's bb823b3)."""

    pool_class = _OneBlockPerKeyPool


class _TrustsHashIndex(PrefixIndex):
    def intern(self, parent: ChainNode, content: Content) -> ChainNode:
        node = super().intern(parent, content)
        if node.collision is not None and not node.blocks and node.ref_count == 0:
            parent.ref_count -= 1
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
        sequence.block_table = [*hits.block_ids, *fresh]
        sequence.num_computed_tokens = sequence.num_cached_blocks = 0
        sequence.num_computed_tokens = len(hits.block_ids) * self.block_size
        sequence.num_cached_blocks = len(hits.block_ids)


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
        return find_hits(self, sequence, sequence.num_tokens // self.block_size)


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


MUTANTS = (
    Mutant("K1", RegistersAtAllocation, "nano-vLLM 2f21442", "prefill_first"),
    Mutant("V1", RegistersAtAllocation, "nano-vLLM 2f21442", "prefill_first"),
    Mutant("E1", RegistersAtAllocation, "nano-vLLM 2f21442", "prefill_first"),
    Mutant("K3", LosesTwin, "BUG-B09, BUG-C42, nano-vLLM bb823b3"),
    Mutant("K4", TrustsHash, "BUG-C38"),
    Mutant("K11", TrustsHash, "BUG-C38"),
    Mutant("K5", TakesBeforePin, "vLLM #37164"),
    Mutant("K6", KeepsStaleEntry, "BUG-C40, BUG-C43, nano-vLLM 2f21442"),
    Mutant("K7", HitsLastBlock, "BUG-C22, nano-vLLM 2f21442"),
    Mutant("K8", HitsWithoutFirstBlock, "own"),
    Mutant("K9", EvictsNewest, "own"),
    Mutant("K10", CountsBeforeCapacity, "BUG-C19", "mixed"),
    Mutant("T1", NeverHits, "own"),
    Mutant("T1", HitsPromptOnly, "own"),
    Mutant("T1", SecondCopyUnregistered, "BUG-C42", "mixed"),
)
