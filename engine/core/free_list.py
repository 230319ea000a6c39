"""An ordered queue of block ids with O(1) push, pop and removal from anywhere."""

from __future__ import annotations

from array import array
from collections.abc import Iterator


class FreeList:
    """Circular doubly linked list in two integer arrays.

    Place 0 is the ring's anchor and block `b` lives at place `b + 1`, so no value means "none".
    The arrays grow with the largest block id seen: memory does not follow the pool's size.
    """

    __slots__ = ("_newer", "_older", "_size")

    def __init__(self) -> None:
        self._older = array("q", [0])
        self._newer = array("q", [0])
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        place = self._newer[0]
        while place:
            yield place - 1
            place = self._newer[place]

    def push(self, block_id: int) -> None:
        """Appends a block that is not in the list."""
        place = block_id + 1
        older, newer = self._older, self._newer
        missing = place + 1 - len(newer)
        if missing > 0:
            older.extend(_zeros(missing))
            newer.extend(_zeros(missing))
        last = older[0]
        newer[last] = place
        older[place] = last
        newer[place] = 0
        older[0] = place
        self._size += 1

    def remove(self, block_id: int) -> None:
        """Takes out a block that is in the list."""
        older, newer = self._older, self._newer
        place = block_id + 1
        before, after = older[place], newer[place]
        newer[before] = after
        older[after] = before
        self._size -= 1

    def pop(self) -> int:
        """Takes out the oldest block of a list that is not empty."""
        assert self._size, "pop from an empty free list"
        block_id = self._newer[0] - 1
        self.remove(block_id)
        return block_id


def _zeros(count: int) -> array[int]:
    return array("q", bytes(8 * count))
