"""`prefill_first` by the book (rules P-B1 to P-B6 of docs/policies.md)."""

from __future__ import annotations

from properties.reference.naive_parts import NaiveParts
from properties.reference.naive_pool import ReferenceBlock
from properties.reference.naive_sequence import StepDraft


class NaivePrefillFirst(NaiveParts):
    """A step is all prefill or all decode."""

    def _prefill_pass(self, step: StepDraft) -> None:
        config = self.config
        while self.waiting and len(step.batch) < config.max_num_seqs:
            sequence = self.waiting[0]
            budget_left = config.max_num_batched_tokens - step.num_tokens
            if budget_left == 0:
                return
            hits: list[ReferenceBlock] = []
            if not sequence.table:
                if config.bound_holders and self._num_holders() >= config.max_num_seqs:
                    return
                hits = self._hits(sequence)
                free_hits = sum(1 for block in hits if block.ref_count == 0)
                needed = self._blocks_for(len(sequence.tokens)) - len(hits)
                if needed + free_hits > self.num_free_blocks:
                    return
                todo = len(sequence.tokens) - len(hits) * config.block_size
            else:
                todo = sequence.remaining
            if todo > budget_left and step.batch:
                return
            if not sequence.table:
                self._take_hits(sequence, hits, step)
                self._take_new(sequence, needed, step)
            count = min(todo, budget_left)
            self._schedule(sequence, count, step)
            if count < todo:
                return
            self.waiting.remove(sequence)
            self._enter_running(sequence)

    def _decode_pass(self, step: StepDraft) -> None:
        config = self.config
        limit = config.max_num_seqs
        if config.bound_decode_tokens:
            limit = min(limit, config.max_num_batched_tokens)
        for sequence in list(self.running):
            if len(step.batch) == limit:
                return
            if sequence not in self.running or self._waits_for_last_token(sequence):
                continue
            needed = self._blocks_for(sequence.computed + 1) - len(sequence.table)
            while needed > self.num_free_blocks and sequence in self.running:
                self._preempt(self.running[-1], step)
            if sequence in self.running:
                self._take_new(sequence, needed, step)
                self._schedule(sequence, 1, step)

    def _num_holders(self) -> int:
        return sum(1 for sequence in self.waiting + self.running if sequence.table)
