"""The pool of KV blocks: reference counts, keys, and the order in which free blocks are reused.

It knows nothing of sequences. Records of blocks are made on first use, so that neither cost nor
memory follow the pool's size.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.block_observer import BlockObserver
from engine.core.errors import KernelBug
from engine.core.free_list import FreeList
from engine.core.hashing import ChainNode, PrefixIndex
from engine.core.host_tier import HostTier


class BlockPool:
    """Blocks 0 .. num_blocks - 1.

    The free queue is, from its front: unregistered freed blocks as a stack (only with
    `unregistered_first`), blocks never used, then freed blocks in order of release (LAW-K9).
    `serve_newest` chooses which of several copies of one key a lookup returns.
    """

    def __init__(
        self, num_blocks: int, index: PrefixIndex, unregistered_first: bool, serve_newest: bool
    ) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.observer: BlockObserver | None = None
        self._index = index
        self._unregistered_first = unregistered_first
        self._served = -1 if serve_newest else 0
        self._ref_counts: list[int] = []
        self._nodes: list[ChainNode | None] = []
        self._free_uncached: list[int] = []
        self._released = FreeList()
        self.tier: HostTier | None = None

    @property
    def num_touched(self) -> int:
        """Blocks that were ever handed out; ids from here on are still fresh."""
        return len(self._ref_counts)

    def ref_count(self, block_id: int) -> int:
        """Number of tables that hold the block."""
        return self._ref_counts[block_id] if block_id < self.num_touched else 0

    def node_of(self, block_id: int) -> ChainNode | None:
        """The key under which the block is registered."""
        return self._nodes[block_id] if block_id < self.num_touched else None

    def free_order(self) -> list[int]:
        """All free block ids, the next one to be handed out first. O(pool)."""
        return [
            *reversed(self._free_uncached),
            *range(self.num_touched, self.num_blocks),
            *self._released,
        ]

    def copy_of(self, node: ChainNode) -> int:
        """The block that a lookup of a registered key returns."""
        return node.blocks[self._served]

    def take(self, count: int) -> list[int]:
        """Hands out blocks from the front of the free queue; old keys end here (LAW-K6).

        The caller has checked that there are enough (LAW-B8).
        """
        assert count <= self.num_free, "LAW-B8: taking is checked before it begins"
        self.num_free -= count
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        if self._free_uncached:
            block_id = self._free_uncached.pop()
        elif self.num_touched < self.num_blocks:
            self._ref_counts.append(1)
            self._nodes.append(None)
            return self.num_touched - 1
        else:
            block_id = self._released.pop()
            node = self._nodes[block_id]
            if self.tier is not None and node is not None:
                self.tier.offload(block_id, node)
            self.unregister(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """Adds a holder to a registered block; a free one leaves the free queue (LAW-K5)."""
        if self._ref_counts[block_id] == 0:
            self._released.remove(block_id)
            self.num_free -= 1
        self._ref_counts[block_id] += 1

    def release(self, table: Sequence[int]) -> None:
        """Takes one holder away from each block, last block first (LAW-B11).

        Raises:
            KernelBug: a block of the table is not held by anybody (LAW-B9).
        """
        ref_counts, nodes = self._ref_counts, self._nodes
        uncached: list[int] = []
        freed = 0
        for block_id in reversed(table):
            count = ref_counts[block_id] - 1
            if count < 0:
                raise KernelBug("B9", f"block {block_id} was freed twice")
            ref_counts[block_id] = count
            if count:
                continue
            freed += 1
            if self._unregistered_first and nodes[block_id] is None:
                uncached.append(block_id)
            else:
                self._released.push(block_id)
        self._free_uncached.extend(reversed(uncached))
        self.num_free += freed

    def register(self, block_id: int, node: ChainNode) -> None:
        """Makes a block of a table findable under its key; copies are all kept (LAW-K3)."""
        assert self._nodes[block_id] is None, "LAW-K3: a block has one key"
        self._nodes[block_id] = node
        node.blocks += (block_id,)
        node.ref_count += 1
        if self.tier is not None:
            self.tier.drop(node)  # LAW-H1: what the pool has, the tier need not keep

    def unregister(self, block_id: int) -> None:
        """Ends a block's key, if it has one."""
        node = self._nodes[block_id]
        if node is not None:
            self._nodes[block_id] = None
            node.blocks = tuple([copy for copy in node.blocks if copy != block_id])
            if self.observer is not None:
                self.observer.removed(node)
            self._index.dereference(node)
