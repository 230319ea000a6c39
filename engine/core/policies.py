"""The scheduling policies; each owns order, admission, chunks, registration time, free order.

Rule numbers (P-A2, P-B2, ...) are those of docs/policies.md.
"""

from __future__ import annotations

from typing import Protocol

from engine.core.block_manager import NO_HITS, Hits
from engine.core.config import KernelConfig
from engine.core.plan import Admission
from engine.core.sequence import Sequence
from engine.core.state import KernelState
from engine.core.step import Step


class Policy(Protocol):
    """Decides a step. A new policy implements this and enters `make_policy`, nothing else."""

    unregistered_first: bool  # freed blocks without a key are reused before all others
    serve_newest: bool  # which of several copies of one key a lookup returns

    def fill(self, state: KernelState, step: Step) -> None:
        """Decides who computes what in this step."""

    def serve(
        self, state: KernelState, step: Step, num_rows: int, chunks: list[tuple[Sequence, int]]
    ) -> None:
        """Serves the oldest `num_rows` decodes and the chunks; settles when they are cached."""

    def admits_none(self, state: KernelState, num_rows: int) -> bool:
        """Whether no waiting request can be admitted while only `num_rows` decodes go on.

        May answer False although the truth is True; never the reverse.
        """


def make_policy(config: KernelConfig) -> Policy:
    """The policy that the configuration names."""
    policies: dict[str, type[Policy]] = {"mixed": MixedPolicy, "prefill_first": PrefillFirstPolicy}
    return policies[config.policy]()


class MixedPolicy:
    """vLLM V1: running sequences first within one budget, then waiting ones; any may be chunked."""

    unregistered_first = True
    serve_newest = False

    def fill(self, state: KernelState, step: Step) -> None:
        """P-A2: serve running, then admit unless somebody was preempted."""
        self.serve(state, step, *self._allot(state, step.token_budget))
        if not step.preempted:  # LAW-S6
            while self._admit_next(state, step):
                pass

    def serve(
        self, state: KernelState, step: Step, num_rows: int, chunks: list[tuple[Sequence, int]]
    ) -> None:
        """P-A3, P-A6: blocks that fill up in this step get their keys before admissions."""
        step.serve(state, num_rows, chunks)
        step.cache_full_blocks(state)

    def _allot(self, state: KernelState, budget: int) -> tuple[int, list[tuple[Sequence, int]]]:
        """Shares the budget out in running order (P-A3): decodes that are served, and chunks."""
        members = state.decodes.members
        if not state.partial_prefills:
            return min(len(members), budget), []
        chunks: list[tuple[Sequence, int]] = []
        first_partial_prefill = next(iter(state.partial_prefills.values()))
        newest_decode = next(reversed(members.values()), first_partial_prefill)
        if (
            newest_decode.admission_index <= first_partial_prefill.admission_index
        ):  # the usual order: all decodes first
            num_rows = min(len(members), budget)
            for sequence in state.partial_prefills.values():
                count = self._chunk(state, sequence, budget - num_rows - sum(n for _, n in chunks))
                if count:
                    chunks.append((sequence, count))
            return num_rows, chunks
        num_rows = 0
        for sequence in state.running.values():
            if budget == 0:
                break
            if sequence.request_id in members:
                num_rows += 1
                budget -= 1
            elif sequence.request_id in state.partial_prefills:
                count = self._chunk(state, sequence, budget)
                chunks.append((sequence, count))
                budget -= count
        return num_rows, chunks

    def _chunk(self, state: KernelState, sequence: Sequence, budget: int) -> int:
        count = sequence.num_tokens - sequence.num_computed_tokens
        threshold = state.config.long_prefill_token_threshold
        return min(count, threshold or count, budget)

    def _admit_next(self, state: KernelState, step: Step) -> bool:
        """P-A4: admits the head of waiting if seats, budget and blocks allow it."""
        waiting, manager = state.waiting, state.manager
        if not waiting or not step.token_budget or len(state.running) >= state.config.max_num_seqs:
            return False  # LAW-S2
        sequence = waiting[0]
        hits = manager.lookup(sequence)
        if self._needed(state, sequence, hits, step.token_budget) > manager.pool.num_free:
            return False  # nobody behind it is tried (LAW-S9)
        waiting.popleft()
        state.run(sequence)
        start = len(hits.block_ids) * manager.block_size
        sequence.num_computed_tokens = start
        count = self._chunk(state, sequence, step.token_budget)
        admit(state, step, sequence, hits, start + count)
        state.partial_prefills[sequence.request_id] = sequence
        step.chunks.append((sequence, count))
        step.token_budget -= count
        manager.cache_full_blocks(sequence, start + count)
        return True

    def _needed(self, state: KernelState, sequence: Sequence, hits: Hits, budget: int) -> int:
        """Free blocks that admission asks for: whole sequence, free hits and watermark counted."""
        manager, config = state.manager, state.config
        total = sequence.num_tokens
        if not config.reserve_full_prompt:
            start = len(hits.block_ids) * manager.block_size
            count = total - start
            total = start + min(count, config.long_prefill_token_threshold or count, budget)
        watermark = config.watermark_blocks if state.running else 0
        return manager.blocks_for(total) - len(hits.block_ids) + hits.num_free + watermark  # LAW-T5

    def admits_none(self, state: KernelState, num_rows: int) -> bool:
        """True if the head lacks a seat, budget, or blocks that no decode can bring."""
        config = state.config
        if not state.waiting or len(state.running) >= config.max_num_seqs:
            return True
        budget = config.max_num_batched_tokens - num_rows
        if budget <= 0:
            return True
        hits = state.manager.lookup(state.waiting[0])
        needed = self._needed(state, state.waiting[0], hits, budget)
        return stays_short_of_blocks(state, hits, needed)


class PrefillFirstPolicy:
    """nano-vLLM: a step is all prefill or all decode, and prefill is tried first."""

    unregistered_first = False
    serve_newest = True

    def fill(self, state: KernelState, step: Step) -> None:
        """P-B2: a prefill step if any prompt can be computed, else a decode step."""
        while self._prefill_next(state, step):
            pass
        if not step.chunks:
            config = state.config
            num_rows = min(len(state.decodes), config.max_num_seqs)
            if config.bound_decode_tokens:
                num_rows = min(num_rows, config.max_num_batched_tokens)  # LAW-S1
            step.serve(state, num_rows, [])
        step.uncached = step.filled(state)  # P-B4: keys come once the blocks are computed

    def serve(
        self, state: KernelState, step: Step, num_rows: int, chunks: list[tuple[Sequence, int]]
    ) -> None:
        """Serves, and leaves the keys to the commit."""
        step.serve(state, num_rows, chunks)
        step.uncached = step.filled(state)

    def _prefill_next(self, state: KernelState, step: Step) -> bool:
        """Computes the head of waiting, or its first part if it is the step's first (LAW-S8)."""
        waiting, manager = state.waiting, state.manager
        if not waiting or not step.token_budget or len(step.chunks) >= state.config.max_num_seqs:
            return False
        sequence = waiting[0]
        hits = NO_HITS
        if not sequence.block_table:
            if self._seats_full(state):
                return False
            hits = manager.lookup(sequence)
            if self._needed(state, sequence, hits) > manager.pool.num_free:
                return False
        start = sequence.num_computed_tokens or len(hits.block_ids) * manager.block_size
        todo = sequence.num_tokens - start
        if todo > step.token_budget and step.chunks:
            return False
        if not sequence.block_table:
            admit(state, step, sequence, hits, sequence.num_tokens)
        count = min(todo, step.token_budget)
        step.chunks.append((sequence, count))
        step.token_budget -= count
        if count < todo:
            return False
        waiting.popleft()
        state.run(sequence)
        return True

    def _seats_full(self, state: KernelState) -> bool:
        config = state.config
        return config.bound_holders and len(state.running) >= config.max_num_seqs  # LAW-S2

    def _needed(self, state: KernelState, sequence: Sequence, hits: Hits) -> int:
        total_blocks = state.manager.blocks_for(sequence.num_tokens)
        return total_blocks - len(hits.block_ids) + hits.num_free  # LAW-T5

    def admits_none(self, state: KernelState, num_rows: int) -> bool:
        """True if the head lacks a seat, or blocks that no decode can bring."""
        if not state.waiting or self._seats_full(state):
            return True
        hits = state.manager.lookup(state.waiting[0])
        return stays_short_of_blocks(state, hits, self._needed(state, state.waiting[0], hits))


def admit(state: KernelState, step: Step, sequence: Sequence, hits: Hits, num_tokens: int) -> None:
    """Gives a waiting sequence its hits and the blocks for `num_tokens`, and records both."""
    state.manager.admit(sequence, hits, num_tokens)
    step.note_blocks(sequence, tuple(sequence.block_table))
    found = len(hits.block_ids)
    step.admitted.append(
        Admission(
            request_id=sequence.request_id,
            hit_tokens=found * state.manager.block_size,
            hit_blocks_used=found - hits.num_free - hits.num_same_step,
            hit_blocks_free=hits.num_free,
            hit_blocks_same_step=hits.num_same_step,
            resumed=sequence.num_preemptions > 0,
        )
    )


def stays_short_of_blocks(state: KernelState, hits: Hits, needed: int) -> bool:
    """Whether the head of waiting lacks blocks and decoding can bring it no further hit.

    Decodes only take free blocks. They can help the head only by filling the very block that its
    lookup missed, which lies as deep as its hits; a sequence with more cached blocks is past it.
    """
    if needed <= state.manager.pool.num_free:
        return False
    depth = len(hits.block_ids)
    return not state.manager.caching or all(
        member.num_cached_blocks > depth for member in state.decodes.members.values()
    )
