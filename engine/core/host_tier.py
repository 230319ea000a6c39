"""The host tier: keys whose KV left the pool and waits in host memory.

It holds what the pool evicts, and gives it up to the pool again on a hit, so a key is in one of the
two, never in both, and together they are one LRU cache of `num_blocks + host_blocks` blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from engine.core.hashing import ChainNode, PrefixIndex
from engine.core.plan import KvCopy


class HostTier:
    """At most `num_blocks` keys, the one evicted from the pool first goes first (LAW-H1).

    Slots are 0 .. num_blocks: one more than keys, so that a block can come in before the one that
    it trades places with has left. `copies` are those of the step that is being decided.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self.num_blocks = num_blocks
        self.copies: list[KvCopy] = []
        self._index = index
        self._slots: OrderedDict[ChainNode, int] = OrderedDict()
        self._free_slots: list[int] = []
        self._num_touched = 0

    def __len__(self) -> int:
        return len(self._slots)

    def slots(self) -> dict[ChainNode, int]:
        """Keys and their slots, the next one to go first."""
        return dict(self._slots)

    def prefix_of(self, nodes: Sequence[ChainNode]) -> tuple[ChainNode, ...]:
        """The leading nodes that are all here (LAW-K8)."""
        found = 0
        while found < len(nodes) and nodes[found] in self._slots:
            found += 1
        return tuple(nodes[:found])

    def offload(self, block_id: int, node: ChainNode) -> None:
        """Takes in a key whose last block in the pool is about to be reused (LAW-H2)."""
        if len(node.blocks) > 1:
            return
        if len(self._slots) == self.num_blocks:
            self.drop(next(iter(self._slots)))
        slot = self._free_slots.pop() if self._free_slots else self._new_slot()
        self._slots[node] = slot
        node.ref_count += 1
        self.copies.append(KvCopy(block_id, slot, to_host=True))

    def claim(self, nodes: Sequence[ChainNode]) -> list[int]:
        """Takes keys out; their slots stay theirs until `load`, whatever is offloaded meanwhile."""
        slots = [self._slots.pop(node) for node in nodes]
        for node in nodes:
            self._index.dereference(node)
        return slots

    def load(self, slot: int, block_id: int) -> None:
        """Copies a claimed slot into a new block and frees the slot (LAW-H2)."""
        self.copies.append(KvCopy(block_id, slot, to_host=False))
        self._free_slots.append(slot)

    def drop(self, node: ChainNode) -> None:
        """Forgets a key, if it is here: it was evicted, or the pool has computed it anew."""
        slot = self._slots.pop(node, None)
        if slot is not None:
            self._free_slots.append(slot)
            self._index.dereference(node)

    def take_copies(self) -> tuple[KvCopy, ...]:
        """The copies of the step that has just been decided, in the order to do them."""
        copies, self.copies = tuple(self.copies), []
        return copies

    def undo(self, copies: Sequence[KvCopy]) -> None:
        """Forgets what the copies of a failed step brought here."""
        written = {copy.host_slot for copy in copies if copy.to_host}
        for node in [node for node, slot in self._slots.items() if slot in written]:
            self.drop(node)

    def _new_slot(self) -> int:
        self._num_touched += 1
        return self._num_touched - 1
