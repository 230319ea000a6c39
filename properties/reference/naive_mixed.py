"""`mixed` and `priority` by the book (rules P-A1 to P-R5 of docs/policies.md)."""

from __future__ import annotations

from properties.reference.naive_parts import NaiveParts
from properties.reference.naive_pool import ReferenceBlock
from properties.reference.naive_sequence import ReferenceSequence, StepDraft


class NaiveMixed(NaiveParts):
    """Running requests first, then waiting ones, within one budget."""

    def _decide_mixed(self, step: StepDraft) -> None:
        partial = [s for s in self.running if self._is_partial(s)]
        only_decodes = (
            0 < self._since_prefill < self.config.prefill_schedule_interval
            and len(self.running) > len(partial)
            and not self._left_waiting
        )  # P-R4
        self._serve_running(step, only_decodes)
        prefilled = any(member.sequence in partial for member in step.batch)
        if not step.preempted:
            prefilled |= self._admit_mixed(step, only_decodes)
            if not only_decodes:
                self._left_waiting = bool(self.waiting)
        if prefilled:
            self._since_prefill = 1
        elif step.batch and self._since_prefill:
            self._since_prefill += 1

    def _is_partial(self, sequence: ReferenceSequence) -> bool:
        """Its newest entry was a chunk that did not reach its end."""
        return sequence.remaining > 0 and not sequence.sampled_since_admission

    def _serve_running(self, step: StepDraft, only_decodes: bool) -> None:
        budget = self.config.max_num_batched_tokens
        for sequence in list(self.running):
            if step.num_tokens == budget:
                return
            if sequence not in self.running:
                continue  # it was preempted
            if self._waits_for_last_token(sequence):
                continue
            if only_decodes and self._is_partial(sequence):
                continue
            count = self._chunk(sequence.remaining, budget - step.num_tokens)
            if count == 0:
                continue
            needed = self._blocks_for(sequence.computed + count) - len(sequence.table)
            while needed > self.num_free_blocks and sequence in self.running:
                self._preempt(self._victim(), step)
            if sequence in self.running:
                self._take_and_schedule(sequence, needed, count, step)

    def _victim(self) -> ReferenceSequence:
        """The newest, or the first of the least important."""
        if not self.by_priority:
            return self.running[-1]
        return max(self.running, key=lambda sequence: sequence.rank)

    def _admit_mixed(self, step: StepDraft, only_decodes: bool) -> bool:
        """Admits while the head of waiting fits; whether a prompt was among them (P-R4)."""
        config = self.config
        prefilled = False
        while self.waiting and step.num_tokens < config.max_num_batched_tokens:
            if len(self.running) >= (config.max_num_active_seqs or config.max_num_seqs):
                break
            sequence = self.waiting[0]
            hits = self._hits(sequence)
            start = len(hits) * config.block_size
            missing = len(sequence.tokens) - start
            if only_decodes and missing > 1:
                break
            count = self._chunk(missing, config.max_num_batched_tokens - step.num_tokens)
            if not self._fits(sequence, hits, start + count):
                break
            self.waiting.remove(sequence)
            self._enter_running(sequence)
            self._take_hits(sequence, hits, step)
            needed = self._blocks_for(start + count) - len(hits)
            self._take_and_schedule(sequence, needed, count, step)
            prefilled |= missing > 1
        return prefilled

    def _fits(
        self, sequence: ReferenceSequence, hits: list[ReferenceBlock], num_tokens: int
    ) -> bool:
        config = self.config
        headroom = config.watermark_blocks if self.running else 0
        free_hits = sum(1 for block in hits if block.ref_count == 0)
        checked = [num_tokens]
        if config.reserve_full_prompt:
            checked.append(len(sequence.tokens))
        return all(
            self._blocks_for(length) - len(hits) + free_hits + headroom <= self.num_free_blocks
            for length in checked
        )

    def _chunk(self, remaining: int, budget_left: int) -> int:
        config, num_requests = self.config, len(self.waiting) + len(self.running)
        threshold = config.long_prefill_token_threshold
        if num_requests <= 1 and not config.threshold_when_alone:
            threshold = 0  # P-R1
        if threshold and config.long_prefill_token_threshold_adaptive:
            threshold = max(threshold, config.max_num_batched_tokens // num_requests)  # P-R2
        if 0 < threshold < remaining:
            remaining = threshold
        return min(remaining, budget_left)

    def _take_and_schedule(
        self, sequence: ReferenceSequence, needed: int, count: int, step: StepDraft
    ) -> None:
        self._take_new(sequence, needed, step)
        self._register(sequence, sequence.computed + count, self.step)
        self._schedule(sequence, count, step)
