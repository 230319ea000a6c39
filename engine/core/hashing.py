"""The chain of block keys: one interned node per distinct (prefix, block) that anybody needs.

A key is a *node*, not a number. The hash only finds candidates; a node is the right one if its
parent node and its tokens are the same, so a collision can never return foreign KV (LAW-K11).
"""

from __future__ import annotations

import json

import xxhash

from engine.core.tokens import Content, digest

ExtraKeys = tuple[tuple[str, str], ...]


class ChainNode:
    """One block of tokens behind one exact prefix.

    `blocks` are the pool's blocks registered under this key, in order of registration (LAW-K3).
    `ref_count` counts registered blocks, child nodes and sequences that rest on the node; it
    lives in the index for as long as that is not zero. A root has `extra_keys` and no parent.
    """

    __slots__ = ("blocks", "collision", "content", "extra_keys", "hash", "parent", "ref_count")

    def __init__(
        self,
        hash_: int,
        parent: ChainNode | None,
        content: Content,
        extra_keys: ExtraKeys | None = None,
    ) -> None:
        self.hash = hash_
        self.extra_keys = extra_keys
        self.parent = parent
        self.content = content
        # Nearly all keys have one block, and a tuple of one takes half the memory of a list.
        self.blocks: tuple[int, ...] = ()
        self.ref_count = 0
        self.collision: ChainNode | None = None


class PrefixIndex:
    """All live chain nodes, found by hash and told apart by prefix and tokens."""

    def __init__(self, hash_bits: int) -> None:
        self._mask = (1 << hash_bits) - 1
        self._buckets: dict[int, ChainNode] = {}
        self._roots: dict[ExtraKeys, ChainNode] = {}

    def __len__(self) -> int:
        return sum(1 for _ in self.nodes())

    def nodes(self) -> list[ChainNode]:
        """Every live node except the roots, for audits."""
        found: list[ChainNode] = []
        for node in self._buckets.values():
            chained: ChainNode | None = node
            while chained is not None:
                found.append(chained)
                chained = chained.collision
        return found

    def root(self, extra_keys: ExtraKeys) -> ChainNode:
        """The node of the empty prefix; each set of typed extra keys has a tree of its own.

        The caller takes a reference before anything else happens.
        """
        root = self._roots.get(extra_keys)
        if root is None:
            seed = xxhash.xxh64_intdigest(json.dumps(extra_keys).encode()) & self._mask
            root = self._roots[extra_keys] = ChainNode(seed, None, b"", extra_keys)
        return root

    def intern(self, parent: ChainNode, content: Content) -> ChainNode:
        """The node of `content` behind `parent`, made if it does not exist (LAW-K2).

        The caller takes a reference to a new node before anything else happens.
        """
        key = digest(content, parent.hash) & self._mask
        node = head = self._buckets.get(key)
        while node is not None:
            if node.parent is parent and node.content == content:
                return node
            node = node.collision
        node = ChainNode(key, parent, content)
        node.collision = head
        self._buckets[key] = node
        parent.ref_count += 1
        return node

    def dereference(self, node: ChainNode) -> None:
        """Takes one reference away; forgets nodes, upwards, that nothing needs any longer."""
        node.ref_count -= 1
        while node.ref_count == 0:
            self._forget(node)
            if node.parent is None:
                return
            node = node.parent
            node.ref_count -= 1

    def _forget(self, node: ChainNode) -> None:
        if node.extra_keys is not None:
            del self._roots[node.extra_keys]
            return
        head = self._buckets[node.hash]
        if head is node:
            if node.collision is None:
                del self._buckets[node.hash]
            else:
                self._buckets[node.hash] = node.collision
            return
        while head.collision is not node:
            assert head.collision is not None, "a live node is in its bucket"
            head = head.collision
        head.collision = node.collision
