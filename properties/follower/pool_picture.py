"""The follower's picture of the pool: references, keys, free queue and contents of all slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Complain = Callable[[str, str], None]


class BlockPicture:
    """What the pool must look like if every law was kept.

    `contents[block][offset]` is the prefix hash whose KV the slot holds (see `model`), or None.
    `keys[block]` is the prefix hash of the last slot of a registered block, or None.
    """

    def __init__(
        self, num_blocks: int, block_size: int, unregistered_first: bool, newest_copy: bool
    ) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.keys: list[int | None] = [None] * num_blocks
        self.dropped: list[int | None] = [None] * num_blocks
        self.contents: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.copies: dict[int, list[int]] = {}
        self.parents: list[int | None] = [None] * num_blocks
        self.keyed_step = [-1] * num_blocks
        self.free = list(range(num_blocks))
        self.num_evicted = 0
        self.unregistered_first = unregistered_first
        self.newest_copy = newest_copy

    def served(self, key: int) -> int | None:
        """The copy that a lookup of `key` must return."""
        copies = self.copies.get(key)
        if not copies:
            return None
        return copies[-1] if self.newest_copy else copies[0]

    def register(self, block: int, key: int, parent: int | None, step: int) -> None:
        """A block became findable."""
        self.keys[block] = key
        self.parents[block] = parent
        self.keyed_step[block] = step
        self.copies.setdefault(key, []).append(block)

    def unregister(self, block: int) -> None:
        """A block's key ended."""
        key = self.keys[block]
        if key is None:
            return
        self.keys[block] = None
        self.dropped[block] = key
        copies = self.copies[key]
        copies.remove(block)
        if not copies:
            del self.copies[key]

    def take_hits(self, blocks: Sequence[int]) -> int:
        """References hits; returns how many came from the free queue."""
        from_free = 0
        for block in blocks:
            if self.refs[block] == 0:
                from_free += 1
                self.free.remove(block)
            self.refs[block] += 1
        return from_free

    def take_new(self, blocks: Sequence[int], hits: Sequence[int], complain: Complain) -> None:
        """Blocks were handed out for new content."""
        count = len(blocks)
        free = self.free
        if list(blocks) != free[:count]:
            for block in blocks:
                if not 0 <= block < self.num_blocks:
                    complain("B1", f"block {block} is not in 0..{self.num_blocks - 1}")
                elif self.refs[block]:
                    law = "K5" if block in hits else "B1"
                    complain(law, f"block {block} was handed out while it was held")
            complain("K9", f"took blocks {list(blocks)}, the free queue began {free[:count]}")
            self.free = [block for block in free if block not in blocks]
        else:
            del free[:count]
        for block in blocks:
            if self.keys[block] is not None:
                self.num_evicted += 1
                self.unregister(block)
            self.refs[block] += 1

    def release(self, table: Sequence[int], complain: Complain) -> None:
        """A table was given back, last block first."""
        loose: list[int] = []
        kept: list[int] = []
        refs = self.refs
        for block in reversed(table):
            refs[block] -= 1
            if refs[block] == 0:
                if self.unregistered_first and self.keys[block] is None:
                    loose.append(block)
                else:
                    kept.append(block)
            elif refs[block] < 0:
                complain("B3", f"block {block} lost a reference that nobody held")
        self.free = loose + self.free + kept if loose else self.free + kept

    def check_eviction_order(self, order: Sequence[int], complain: Complain) -> None:
        """LAW-B11: some copy of a free registered block's parent is held or outlives it."""
        place = {block: index for index, block in enumerate(order)}
        for block in order:
            parent = self.parents[block]
            if self.keys[block] is None or parent is None:
                continue
            outlives = any(
                self.refs[copy] or place.get(copy, -1) > place[block]
                for copy in self.copies.get(parent, ())
            )
            if not outlives:
                complain("B11", f"the prefix of block {block} is evicted before it: {order}")
