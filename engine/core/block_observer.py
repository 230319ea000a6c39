"""Who is told which blocks the prefix cache gains and loses; nothing it does changes a decision."""

from __future__ import annotations

from typing import Protocol

from engine.core.hashing import ChainNode


class BlockObserver(Protocol):
    """Set as `BlockPool.observer`; calls come within a step and must only take notes.

    Each registered copy of a key is stored once and removed once.
    """

    def stored(self, nodes: list[ChainNode]) -> None:
        """Blocks were registered under these keys, each the parent of the next."""

    def removed(self, node: ChainNode) -> None:
        """One block of that key is no longer findable; `node.blocks` are the copies left."""
