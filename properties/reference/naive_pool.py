"""The reference block pool: one object per block, a list as free queue, whole prefixes as keys."""

from __future__ import annotations

# Extra keys and *all* tokens from position 0 on: an ideal hash that cannot collide.
PrefixKey = tuple[tuple[tuple[str, str], ...], tuple[int, ...]]


class ReferenceBlock:
    """One block; `registered_step` is the step in which it got its key."""

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: PrefixKey | None = None
        self.registered_step = -1


class ReferencePool:
    """All blocks, the free queue (front is handed out first) and the order of registration."""

    def __init__(self, num_blocks: int, unregistered_first: bool, newest_copy: bool) -> None:
        self.blocks = [ReferenceBlock(block_id) for block_id in range(num_blocks)]
        self.free = list(self.blocks)
        # Copies of one key in order of registration; nothing stale, nothing lost (LAW-K3).
        self.copies: dict[PrefixKey, list[ReferenceBlock]] = {}
        self.unregistered_first = unregistered_first
        self.newest_copy = newest_copy

    def lookup(self, key: PrefixKey) -> ReferenceBlock | None:
        """The copy that serves a key, or None; changes nothing (LAW-K10)."""
        copies = self.copies.get(key)
        if not copies:
            return None
        return copies[-1] if self.newest_copy else copies[0]

    def take_hit(self, block: ReferenceBlock) -> None:
        """Adds a reference; a free block leaves the queue from wherever it stands."""
        if block.ref_count == 0:
            self.free.remove(block)
        block.ref_count += 1

    def take_new(self, count: int) -> list[ReferenceBlock]:
        """Hands out the front of the free queue; only now do its keys end (LAW-K6)."""
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count, "the caller counts before it takes"
        for block in taken:
            self.unregister(block)
            block.ref_count = 1
        return taken

    def register(self, block: ReferenceBlock, key: PrefixKey, step: int) -> None:
        """Makes a full block findable, beside copies of the same content."""
        assert block.key is None, "a block gets one key between two hand-outs"
        block.key = key
        block.registered_step = step
        self.copies.setdefault(key, []).append(block)

    def unregister(self, block: ReferenceBlock) -> None:
        """Forgets a block's key and its entry."""
        if block.key is None:
            return
        self.copies[block.key].remove(block)
        if not self.copies[block.key]:
            del self.copies[block.key]
        block.key = None

    def release(self, table: list[ReferenceBlock]) -> None:
        """Gives back a table from its last block to its first (LAW-B11, LAW-K9)."""
        unregistered: list[ReferenceBlock] = []
        registered: list[ReferenceBlock] = []
        for block in reversed(table):
            assert block.ref_count > 0, "double free"
            block.ref_count -= 1
            if block.ref_count == 0:
                if self.unregistered_first and block.key is None:
                    unregistered.append(block)
                else:
                    registered.append(block)
        self.free = unregistered + self.free + registered
