"""`prefill_first`: nano-vLLM's policy (bb823b3). Rules P-B2, P-B4, ...: docs/policies.md."""

from __future__ import annotations

from typing import ClassVar

from engine.core.block_manager import NO_HITS, Hits
from engine.core.config import KernelConfig
from engine.core.policies.policy import Policy, admit, stays_short_of_blocks
from engine.core.sequence import Sequence
from engine.core.state import KernelState
from engine.core.step import Step


class PrefillFirstPolicy(Policy):
    """A step is all prefill or all decode, and prefill is tried first."""

    options: ClassVar = frozenset({"bound_holders", "bound_decode_tokens", "bound_model_len"})
    unregistered_first: ClassVar = False
    serve_newest: ClassVar = True
    registers_when_scheduled: ClassVar = False
    waiting_head_holds_blocks: ClassVar = True

    @classmethod
    def bounds_holders(cls, config: KernelConfig) -> bool:
        """nano-vLLM does not: half-done prompts hold blocks beside a full `running`."""
        return config.bound_holders

    @classmethod
    def ends_at_max_model_len(cls, config: KernelConfig) -> bool:
        """nano-vLLM does not look at `max_model_len` once a request runs."""
        return config.bound_model_len

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
