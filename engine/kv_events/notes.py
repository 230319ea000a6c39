"""Notes of one scheduler's block events, and their translation into messages.

Notes are taken within a step and cost next to nothing; hashing belongs to the publisher's thread.
"""

from __future__ import annotations

from array import array

from engine.core.block_observer import BlockObserver
from engine.core.hashing import ChainNode
from engine.kv_events.block_hash import BlockHasher, ExtraKeys
from engine.kv_events.wire import (
    MEDIUM,
    SPEC_KIND,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
)

# Nodes that were stored; a node that was removed, and whether none of its copies is left; or
# None: everything was cleared.
Note = list[ChainNode] | tuple[ChainNode, bool] | None
_SALT = "salt"


class BlockNotes(BlockObserver):
    """Takes notes until the step ends."""

    def __init__(self) -> None:
        self._notes: list[Note] = []

    def stored(self, nodes: list[ChainNode]) -> None:
        """Notes blocks that can be hit."""
        self._notes.append(nodes)

    def removed(self, node: ChainNode) -> None:
        """Notes a block that cannot be hit any longer."""
        self._notes.append((node, not node.blocks))

    def cleared(self) -> None:
        """Notes that nothing can be hit."""
        self._notes.append(None)

    def take(self) -> list[Note]:
        """The notes since the last call."""
        notes, self._notes = self._notes, []
        return notes


class Translator:
    """Turns notes into events; knows the digests of the blocks that are stored, and only those."""

    def __init__(self, hasher: BlockHasher, block_size: int) -> None:
        self._hasher, self._block_size = hasher, block_size
        self._digests: dict[ChainNode, bytes] = {}

    def __len__(self) -> int:
        return len(self._digests)

    def events(self, notes: list[Note]) -> list[KvEvent]:
        """The events of notes in their order.

        Blocks with keys that no other request can have are private, and left out.
        """
        found: list[KvEvent] = []
        for note in notes:
            if note is None:
                self._digests.clear()
                found.append(AllBlocksCleared())
            elif isinstance(note, list):
                found += self._stored(note)
            elif note[0] in self._digests:
                digest = self._digests.pop(note[0]) if note[1] else self._digests[note[0]]
                found.append(BlockRemoved([self._hasher.external(digest)], MEDIUM, 0))
        return found

    def _stored(self, nodes: list[ChainNode]) -> list[KvEvent]:
        salt = _salt(nodes[0])
        if salt is None:
            return []
        parent = nodes[0].parent
        assert parent is not None, "a block is no root"
        is_first = parent.parent is None
        parent_digest = self._digest(parent)
        token_ids: list[int] = []
        for node in nodes:
            token_ids.extend(_token_ids(node))
            self._digests[node] = self._digest(node)
        external = self._hasher.external
        keys: list[tuple[str, ...] | None] = [None] * len(nodes)
        if is_first and salt:
            keys[0] = (salt,)
        return [
            BlockStored(
                [external(self._digests[node]) for node in nodes],
                None if is_first else external(parent_digest),
                token_ids,
                self._block_size,
                None,
                MEDIUM,
                None,
                keys,
                0,
                SPEC_KIND,
            )
        ]

    def _digest(self, node: ChainNode) -> bytes:
        """The digest of a node; known ones of its prefix are used."""
        unknown: list[ChainNode] = []
        walked: ChainNode = node
        while walked.parent is not None and walked not in self._digests:
            unknown.append(walked)
            walked = walked.parent
        digest = self._digests.get(walked, self._hasher.none_hash)
        for one in reversed(unknown):
            digest = self._hasher.block(digest, tuple(_token_ids(one)), _extra_keys(one))
        return digest


def _extra_keys(node: ChainNode) -> ExtraKeys:
    parent = node.parent
    assert parent is not None, "a block is no root"
    if parent.parent is not None or not parent.extra_keys:
        return None
    return tuple(("cache_salt", value) for _, value in parent.extra_keys)


def _salt(node: ChainNode) -> str | None:
    """The salt of a block's tree; empty where it has none, None where the tree is private."""
    root = node
    while root.parent is not None:
        root = root.parent
    keys = root.extra_keys or ()
    if not keys:
        return ""
    return keys[0][1] if len(keys) == 1 and keys[0][0] == _SALT else None


def _token_ids(node: ChainNode) -> list[int]:
    content = node.content
    if isinstance(content, range):
        return list(content)
    return memoryview(content).cast("q").tolist() if LITTLE else _swapped(content)


LITTLE = array("q", [1]).tobytes()[0] == 1


def _swapped(content: bytes) -> list[int]:
    ids = array("q", content)
    ids.byteswap()
    return ids.tolist()
