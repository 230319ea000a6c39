"""Checks every law that speaks of the kernel's state; one function per family of laws.

Used by the engine's debug mode, the simulator and the property suites alike. It reads the state
and never changes it.
"""

from __future__ import annotations

from array import array
from collections import Counter

from engine.core.errors import KernelBug
from engine.core.hashing import ChainNode
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from engine.core.tokens import Content, content_of


def audit(scheduler: Scheduler) -> None:
    """Checks blocks, keys and queues between two steps (no plan may be open).

    Raises:
        KernelBug: names the law that is broken.
    """
    _check_blocks(scheduler)
    _check_keys(scheduler)
    _check_tier(scheduler)
    _check_queues(scheduler)
    _check_tables(scheduler)


def _require(holds: bool, law: str, detail: str) -> None:
    if not holds:
        raise KernelBug(law, detail)


def _check_blocks(scheduler: Scheduler) -> None:
    pool = scheduler.state.manager.pool
    free = pool.free_order() if pool.num_blocks <= 4096 else _free_but_fresh(scheduler)
    _require(len(set(free)) == len(free), "B2", "an id occurs twice in the free list")
    held = Counter[int]()
    for sequence in scheduler.state.sequences.values():
        _require(
            len(set(sequence.block_table)) == len(sequence.block_table),
            "B5",
            f"a block occurs twice in the table of {sequence.request_id!r}",
        )
        held.update(sequence.block_table)
    for block_id in range(pool.num_touched):
        count = pool.ref_count(block_id)
        _require(
            count == held[block_id],
            "B3",
            f"block {block_id}: ref_count {count}, in {held[block_id]} tables",
        )
    _require(not held.keys() & set(free), "B1", "a block is both free and used")
    used = len([block for block, count in held.items() if count])
    _require(used + pool.num_free == pool.num_blocks, "B1", "free and used do not add up")
    _require(
        len(free) + (0 if pool.num_blocks <= 4096 else pool.num_blocks - pool.num_touched)
        == pool.num_free,
        "B4",
        "the count of free blocks is wrong",
    )


def _free_but_fresh(scheduler: Scheduler) -> list[int]:
    pool = scheduler.state.manager.pool
    return [block for block in range(pool.num_touched) if pool.ref_count(block) == 0]


def _check_keys(scheduler: Scheduler) -> None:
    manager = scheduler.state.manager
    pool = manager.pool
    found = dict[int, ChainNode]()
    for node in manager.index.nodes():
        _require(node.ref_count > 0, "K3", "a node that nothing needs is still in the index")
        for block_id in node.blocks:
            _require(block_id not in found, "K3", f"block {block_id} has two keys")
            found[block_id] = node
    for block_id in range(pool.num_touched):
        _require(
            pool.node_of(block_id) is found.get(block_id),
            "K3",
            f"block {block_id}: its key and the index disagree",
        )
    _require(manager.caching or not found, "K1", "blocks have keys although prefix caching is off")


def _check_tier(scheduler: Scheduler) -> None:
    tier = scheduler.state.manager.tier
    if tier is None:
        return
    slots = tier.slots()
    _require(len(slots) <= tier.num_blocks, "H1", f"{len(slots)} keys in the host tier")
    _require(len(set(slots.values())) == len(slots), "H1", "two keys share a slot of the host tier")
    live = set(scheduler.state.manager.index.nodes())
    for node, slot in slots.items():
        _require(not node.blocks, "H1", f"slot {slot} keeps a key that the pool holds")
        _require(node in live, "H1", f"slot {slot} keeps a key that is not in the index")


def _check_queues(scheduler: Scheduler) -> None:
    state, config = scheduler.state, scheduler.config
    waiting = [sequence.request_id for sequence in state.waiting]
    everywhere = [*waiting, *state.running]
    _require(
        sorted(map(repr, everywhere)) == sorted(map(repr, state.sequences)),
        "S4",
        "a live request is not in exactly one queue",
    )
    admissions = [sequence.admission_index for sequence in state.running.values()]
    _require(admissions == sorted(admissions), "S9", "running is not in order of admission")
    members = [*state.decodes.members, *state.partial_prefills]
    _require(set(members) == set(state.running), "S4", "status and queue disagree")
    _require(len(members) == len(set(members)), "S4", "a sequence both decodes and prefills")
    holders = [s for s in state.sequences.values() if s.block_table]
    policy = scheduler.policy
    if policy.bounds_holders(config):
        _require(len(holders) <= config.max_num_seqs, "S2", "too many sequences hold blocks")
    half_done = [*state.partial_prefills.values(), *[s for s in state.waiting if s.block_table]]
    if config.long_prefill_token_threshold == 0:
        _require(len(half_done) <= 1, "S8", "two prompts are half done")
    for sequence in state.waiting:
        if sequence.block_table:
            allowed = policy.waiting_head_holds_blocks and sequence is state.waiting[0]
            _require(allowed, "B6", f"{sequence.request_id!r} waits and holds blocks")


def _check_tables(scheduler: Scheduler) -> None:
    manager = scheduler.state.manager
    for sequence in scheduler.state.sequences.values():
        name = sequence.request_id
        tokens = [*sequence.prompt, *scheduler.output_token_ids(name)]
        computed = scheduler.num_computed_tokens(name)
        _require(0 <= computed <= len(tokens), "S5", f"{name!r}: {computed} tokens computed")
        if sequence.decoding:
            _require(
                computed == len(tokens) - 1, "S5", f"{name!r} decodes with {computed} computed"
            )
            _require(len(tokens) < sequence.limit, "L6", f"{name!r} goes on past its limit")
        reserved = computed
        whole = scheduler.policy.waiting_head_holds_blocks
        if whole and sequence.block_table and not sequence.decoding:
            reserved = len(tokens)
        _require(
            len(sequence.block_table) == manager.blocks_for(reserved),
            "B6",
            f"{name!r}: {len(sequence.block_table)} blocks for {reserved} tokens",
        )
        if manager.caching:
            _check_cached_blocks(scheduler, sequence, tokens, computed)


def _check_cached_blocks(
    scheduler: Scheduler, sequence: Sequence, tokens: list[int], computed: int
) -> None:
    manager = scheduler.state.manager
    size = manager.block_size
    for index, block_id in enumerate(sequence.block_table):
        node = manager.pool.node_of(block_id)
        full = (index + 1) * size <= computed
        _require(
            (node is not None) == full,
            "K1",
            f"block {index} of {sequence.request_id!r}: full is {full}, keyed {node is not None}",
        )
        while node is not None and node.parent is not None:
            start = index * size
            _require(
                node.content == _content(tokens[start : start + size]),
                "K4",
                f"block {block_id} at {index} of {sequence.request_id!r} holds other tokens",
            )
            node, index = node.parent, index - 1


def _content(tokens: list[int]) -> Content:
    return content_of(array("q", tokens))
