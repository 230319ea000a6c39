"""`mixed`: vLLM V1's first-come-first-served policy. Rules P-A2, P-R1, ...: docs/policies.md."""

from __future__ import annotations

from typing import ClassVar

from engine.core.block_manager import Hits
from engine.core.policies.policy import Policy, admit, stays_short_of_blocks
from engine.core.request import RequestId
from engine.core.sequence import Sequence
from engine.core.state import KernelState
from engine.core.step import Step


class MixedPolicy(Policy):
    """Running sequences first within one token budget, then waiting ones; any may be chunked."""

    options: ClassVar = frozenset(
        {
            "long_prefill_token_threshold",
            "long_prefill_token_threshold_adaptive",
            "threshold_when_alone",
            "max_num_active_seqs",
            "prefill_schedule_interval",
            "watermark_blocks",
            "host_blocks",
            "reserve_full_prompt",
        }
    )
    unregistered_first: ClassVar = True
    serve_newest: ClassVar = False
    registers_when_scheduled: ClassVar = True
    waiting_head_holds_blocks: ClassVar = False

    def __init__(self) -> None:
        self._steps_since_prefill = 0
        self._left_waiting = False

    def fill(self, state: KernelState, step: Step) -> None:
        """P-A2: serve running, then admit unless somebody was preempted."""
        spread = state.config.prefill_schedule_interval > 1
        step.decodes_only = spread and self._holds_prefill_back(state)
        partial = {**state.partial_prefills} if spread else {}
        self.serve(state, step, *self._allot(state, step))
        if not step.preempted:  # LAW-S6
            while self._admit_next(state, step):
                pass
            if not step.decodes_only:
                self._left_waiting = bool(state.waiting)
        if spread:
            self._note_prefill(step, partial)

    def serve(
        self, state: KernelState, step: Step, num_rows: int, chunks: list[tuple[Sequence, int]]
    ) -> None:
        """P-A3, P-A6: blocks that fill up now get their keys before anybody is admitted."""
        step.serve(state, num_rows, chunks)
        step.cache_full_blocks(state)

    def _allot(self, state: KernelState, step: Step) -> tuple[int, list[tuple[Sequence, int]]]:
        """Shares the budget out in running order (P-A3): decodes that are served, and chunks.

        A half-done prompt stands behind the decodes that were admitted before it and before the
        others, so this walks through `running`; without one all that matters is their number.
        """
        members, budget = state.decodes.members, step.token_budget
        if step.decodes_only or not state.partial_prefills:
            return min(len(members), budget), []
        num_rows = 0
        chunks: list[tuple[Sequence, int]] = []
        for sequence in state.running.values():
            if budget == 0:
                break
            if sequence.request_id in members:
                num_rows += 1
                budget -= 1
            elif count := self._tokens_now(state, sequence, budget):
                chunks.append((sequence, count))
                budget -= count
        return num_rows, chunks

    def _tokens_now(self, state: KernelState, sequence: Sequence, budget: int) -> int:
        """Tokens that a running sequence gets; 0 if it only waits for its last token (P-P2)."""
        if sequence.request_id in state.decodes.members:
            return 1
        if sequence.request_id not in state.partial_prefills:
            return 0
        return self._chunk(state, sequence.num_tokens - sequence.num_computed_tokens, budget)

    def _chunk(self, state: KernelState, remaining: int, budget: int) -> int:
        """Tokens that a prompt with `remaining` ones to compute gets in this step."""
        return min(remaining, self._threshold(state) or remaining, budget)

    def _threshold(self, state: KernelState) -> int:
        """The longest chunk of one prompt; 0 = no limit. The same throughout a step."""
        config = state.config
        threshold = config.long_prefill_token_threshold
        if not threshold:
            return 0
        num_requests = len(state.running) + len(state.waiting)
        if num_requests <= 1 and not config.threshold_when_alone:
            return 0  # P-R1
        if config.long_prefill_token_threshold_adaptive:
            threshold = max(threshold, config.max_num_batched_tokens // num_requests)  # P-R2
        return threshold

    def _seats_full(self, state: KernelState) -> bool:
        config = state.config
        return len(state.running) >= (config.max_num_active_seqs or config.max_num_seqs)  # P-R3

    def _admit_next(self, state: KernelState, step: Step) -> bool:
        """P-A4: admits the head of waiting if seats, budget and blocks allow it."""
        waiting, manager = state.waiting, state.manager
        if not waiting or not step.token_budget or self._seats_full(state):
            return False  # LAW-S2
        sequence = waiting[0]
        hits = manager.lookup(sequence)
        start = hits.num_blocks * manager.block_size
        if step.decodes_only and sequence.num_tokens - start > 1:
            return False  # P-R4
        if self._needed(state, sequence, hits, step.token_budget) > manager.pool.num_free:
            return False  # nobody behind it is tried (LAW-S9)
        count = self._chunk(state, sequence.num_tokens - start, step.token_budget)
        waiting.popleft()
        state.run(sequence)
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
            start = hits.num_blocks * manager.block_size
            total = start + self._chunk(state, total - start, budget)
        watermark = config.watermark_blocks if state.running else 0
        return manager.blocks_for(total) - len(hits.block_ids) + hits.num_free + watermark  # LAW-T5

    def admits_none(self, state: KernelState, num_rows: int) -> bool:
        """True if the head lacks a seat, budget, or blocks that no decode can bring."""
        if state.config.prefill_schedule_interval > 1:
            return False  # which step may admit depends on how many have passed
        if not state.waiting or self._seats_full(state):
            return True
        budget = state.config.max_num_batched_tokens - num_rows
        if budget <= 0:
            return True
        hits = state.manager.lookup(state.waiting[0])
        needed = self._needed(state, state.waiting[0], hits, budget)
        return stays_short_of_blocks(state, hits, needed)

    # Prefill spread over steps (P-R4) ---------------------------------------------------------

    def _holds_prefill_back(self, state: KernelState) -> bool:
        """Whether this step leaves prompts alone, because a step before it carried prefill."""
        return (
            0 < self._steps_since_prefill < state.config.prefill_schedule_interval
            and len(state.running) > len(state.partial_prefills)
            and not self._left_waiting
        )

    def _note_prefill(self, step: Step, partial: dict[RequestId, Sequence]) -> None:
        """Counts non-empty steps from one that carried prefill on; 0 = none yet."""
        if not step.num_rows and not step.chunks:
            return
        admitted = {admission.request_id for admission in step.admitted}
        carried = any(
            sequence.request_id in partial
            or (
                sequence.request_id in admitted
                and sequence.num_tokens - sequence.num_computed_tokens > 1
            )
            for sequence, _ in step.chunks
        )
        if carried:
            self._steps_since_prefill = 1
        elif self._steps_since_prefill:
            self._steps_since_prefill += 1
