"""Block tables: lookup of cached prefixes, allocation, caching of full blocks, release.

Ask first, then do: `lookup` and the policy's capacity test change nothing (LAW-K10); what follows a
passed test cannot fail (LAW-B8).
"""

from __future__ import annotations

from typing import NamedTuple

from engine.core.block_pool import BlockPool
from engine.core.config import KernelConfig
from engine.core.hashing import ChainNode, PrefixIndex
from engine.core.host_tier import HostTier
from engine.core.plan import KvCopy
from engine.core.sequence import Sequence
from engine.core.tokens import Content, content_of


class Hits(NamedTuple):
    """What a lookup found: blocks in order, and how many of them are free or brand-new.

    `host` are the keys behind them that the host tier holds; each asks for a new block.
    """

    block_ids: tuple[int, ...]
    num_free: int
    num_same_step: int
    host: tuple[ChainNode, ...] = ()

    @property
    def num_blocks(self) -> int:
        """Blocks whose tokens need not be computed."""
        return len(self.block_ids) + len(self.host)


NO_HITS = Hits((), 0, 0)


class BlockManager:
    """Owns the pool and the prefix index; works on one sequence at a time."""

    def __init__(self, config: KernelConfig, unregistered_first: bool, serve_newest: bool) -> None:
        self.block_size = config.block_size
        self.caching = config.enable_prefix_caching
        self.index = PrefixIndex(config.hash_bits)
        self.pool = BlockPool(config.num_blocks, self.index, unregistered_first, serve_newest)
        # Blocks registered since the step began, for discard() and for same-step hits.
        self.cached_in_step: dict[int, None] = {}
        self.tier: HostTier | None = None
        if config.host_blocks:
            self.attach(HostTier(config.host_blocks, self.index))

    def attach(self, tier: HostTier) -> None:
        """Puts a host tier behind the pool."""
        self.tier = self.pool.tier = tier

    def take_copies(self) -> tuple[KvCopy, ...]:
        """The copies that the step being decided asks for."""
        return () if self.tier is None else self.tier.take_copies()

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def lookup(self, sequence: Sequence) -> Hits:
        """The longest registered prefix of a waiting sequence, less its end (LAW-K7, LAW-K8)."""
        if not self.caching:
            return NO_HITS
        most = (sequence.num_tokens - 1) // self.block_size  # LAW-K7
        self._extend_chain(sequence, most)
        block_ids: list[int] = []
        num_free = num_same_step = 0
        pool = self.pool
        for node in sequence.chain[:most]:
            if not node.blocks:
                break
            block_id = pool.copy_of(node)
            block_ids.append(block_id)
            if pool.ref_count(block_id) == 0:
                num_free += 1
            elif block_id in self.cached_in_step:
                num_same_step += 1
        host: tuple[ChainNode, ...] = ()
        if self.tier is not None:
            host = self.tier.prefix_of(sequence.chain[len(block_ids) : most])
        return Hits(tuple(block_ids), num_free, num_same_step, host)

    def admit(self, sequence: Sequence, hits: Hits, num_tokens: int) -> None:
        """Gives a sequence without blocks its hits and new blocks for `num_tokens` in all."""
        assert not sequence.block_table, "LAW-B6: a waiting sequence holds no blocks"
        for block_id in hits.block_ids:
            self.pool.share(block_id)  # LAW-K5: held before anything else is taken
        sequence.block_table.extend(hits.block_ids)
        if hits.host:
            self._load(sequence, hits.host)
        sequence.num_computed_tokens = hits.num_blocks * self.block_size
        sequence.num_cached_blocks = hits.num_blocks
        self.extend(sequence, num_tokens)

    def _load(self, sequence: Sequence, nodes: tuple[ChainNode, ...]) -> None:
        """Brings keys of the host tier into new blocks, one by one: each may trade places."""
        assert self.tier is not None, "LAW-H2: only a tier has keys to load"
        for node, slot in zip(nodes, self.tier.claim(nodes), strict=True):
            (block_id,) = self.pool.take(1)
            self.tier.load(slot, block_id)
            self.pool.register(block_id, node)
            self.cached_in_step[block_id] = None
            sequence.block_table.append(block_id)

    def missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that the table lacks for `num_tokens` tokens."""
        return max(0, self.blocks_for(num_tokens) - len(sequence.block_table))

    def extend(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        """Appends the missing blocks for `num_tokens` tokens (LAW-B7) and returns them."""
        taken = self.pool.take(self.missing(sequence, num_tokens))
        sequence.block_table.extend(taken)
        return tuple(taken)

    def cache_full_blocks(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Registers the blocks that are full with `num_computed_tokens` tokens (LAW-K1)."""
        num_full = num_computed_tokens // self.block_size
        if not self.caching or num_full <= sequence.num_cached_blocks:
            return
        self._extend_chain(sequence, num_full)
        for index in range(sequence.num_cached_blocks, num_full):
            block_id = sequence.block_table[index]
            self.pool.register(block_id, sequence.chain[index])
            self.cached_in_step[block_id] = None
        if self.pool.observer is not None:
            self.pool.observer.stored(sequence.chain[sequence.num_cached_blocks : num_full])
        sequence.num_cached_blocks = num_full

    def release(self, sequence: Sequence) -> None:
        """Gives all blocks back; a second call changes nothing (LAW-B9)."""
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = 0
        sequence.num_cached_blocks = 0

    def forget_chain(self, sequence: Sequence) -> None:
        """Drops a finished sequence's hold on its keys."""
        if sequence.chain:
            self.index.dereference(sequence.chain[-1])
            sequence.chain = []
        if sequence.root is not None:
            self.index.dereference(sequence.root)
            sequence.root = None

    def _extend_chain(self, sequence: Sequence, num_blocks: int) -> None:
        """Makes the keys of the first `num_blocks` blocks; it holds only the deepest."""
        chain = sequence.chain
        if len(chain) >= num_blocks:
            return
        index = self.index
        if sequence.root is None:
            sequence.root = index.root(sequence.request.extra_keys)
            sequence.root.ref_count += 1
        before = chain[-1] if chain else None
        node = before or sequence.root
        for number in range(len(chain), num_blocks):
            node = index.intern(node, self._content(sequence, number * self.block_size))
            chain.append(node)
        node.ref_count += 1
        if before is not None:
            index.dereference(before)

    def _content(self, sequence: Sequence, start: int) -> Content:
        stop = start + self.block_size
        prompt = sequence.prompt
        known = len(prompt)
        if stop <= known:
            return prompt.content(start, stop)
        if start >= known:
            return content_of(sequence.output_token_ids[start - known : stop - known])
        return content_of(prompt.tokens(start, known) + sequence.output_token_ids[: stop - known])
