"""The reference scheduler: what both policies share, one sequence object per request."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from engine.core.config import KernelConfig
from engine.core.errors import RequestRejected
from engine.core.plan import Admission, Entry, Finished, NewBlocks, StepOutcome
from engine.core.request import Request, RequestId
from properties.reference.naive_pool import PrefixKey, ReferenceBlock, ReferencePool
from properties.reference.naive_sequence import (
    ReferencePlan,
    ReferenceSequence,
    StepDraft,
    rejection,
)


class ReferenceScheduler:
    """Both policies by the book; slow on purpose. `Scheduler`'s interface without async steps."""

    def __init__(self, config: KernelConfig) -> None:
        self.config = config
        mixed = config.policy == "mixed"
        self.pool = ReferencePool(
            config.num_blocks, unregistered_first=mixed, newest_copy=not mixed
        )
        self.waiting: list[ReferenceSequence] = []
        self.running: list[ReferenceSequence] = []
        self.step = 0
        self._next_serial = 1
        self._open: tuple[ReferencePlan, list[tuple[ReferenceSequence, int]]] | None = None

    # ---- what the caller sees ----

    @property
    def has_work(self) -> bool:
        """True while a request is live."""
        return bool(self.waiting or self.running)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self.pool.free)

    def waiting_ids(self) -> list[RequestId]:
        """The waiting queue, front first."""
        return [sequence.request_id for sequence in self.waiting]

    def running_ids(self) -> list[RequestId]:
        """The running queue, front first."""
        return [sequence.request_id for sequence in self.running]

    def free_order(self) -> list[int]:
        """Free blocks, next one to be handed out first."""
        return [block.block_id for block in self.pool.free]

    def block_table(self, request_id: RequestId) -> tuple[int, ...]:
        """The blocks of a live request."""
        return tuple(block.block_id for block in self.find(request_id).table)

    def num_computed_tokens(self, request_id: RequestId) -> int:
        """Tokens of a live request whose KV is valid."""
        return self.find(request_id).computed

    def find(self, request_id: RequestId) -> ReferenceSequence:
        """The live sequence with this id."""
        for sequence in self.waiting + self.running:
            if sequence.request_id == request_id:
                return sequence
        raise KeyError(request_id)

    def add(self, request: Request) -> None:
        """Queues a request, or rejects it before anything changes (LAW-C1)."""
        reason = rejection(self.config, request, self.waiting_ids() + self.running_ids())
        if reason:
            raise RequestRejected(request.request_id, reason, "by the reference")
        self.waiting.append(ReferenceSequence(request))

    def abort(self, request_id: RequestId) -> Finished | None:
        """Ends a request now, or at the commit of the open step (LAW-L8)."""
        sequence = self.find(request_id)
        if self._open:
            sequence.aborted = True
            return None
        return self._finish(sequence, "abort")

    def schedule(self) -> ReferencePlan:
        """Decides one step."""
        assert self.has_work and self._open is None
        decided = StepDraft()
        if self.config.policy == "mixed":
            self._serve_running(decided)
            if not decided.preempted:
                self._admit_mixed(decided)
        else:
            self._prefill_pass(decided)
            if not decided.batch:
                self._decode_pass(decided)
        plan = ReferencePlan(
            step=self.step,
            entries=tuple(self._entry(sequence, count) for sequence, count in decided.batch),
            new_blocks=tuple(decided.new_blocks),
            admitted=tuple(decided.admitted),
            preempted=tuple(decided.preempted),
            num_free_blocks=self.num_free_blocks,
        )
        self.step += 1
        self._open = (plan, decided.batch)
        return plan

    def commit(
        self,
        plan: ReferencePlan,
        token_ids: Sequence[int],
        stopped: Collection[RequestId] = (),
    ) -> StepOutcome:
        """Applies the results of a step in batch order."""
        assert self._open is not None and self._open[0] is plan
        assert len(token_ids) == len(plan.sampled_ids)
        batch, self._open = self._open[1], None
        tokens = iter(token_ids)
        sampled: list[RequestId] = []
        kept: list[int] = []
        ending: list[tuple[ReferenceSequence, str]] = []
        for sequence, count in batch:
            if self.config.policy == "prefill_first":
                self._register_full_blocks(sequence, count, plan.step)
            sequence.computed += count
            token = next(tokens) if sequence.remaining == 0 else None
            if token is not None and not sequence.aborted:
                sampled.append(sequence.request_id)
                kept.append(token)
                self._append_token(sequence, token)
                reason = self._finish_reason(sequence, token, sequence.request_id in stopped)
                if reason:
                    ending.append((sequence, reason))
        finished = self._end_all(ending)
        return StepOutcome(plan.step, tuple(sampled), tuple(kept), finished)

    def discard(self, plan: ReferencePlan) -> tuple[Finished, ...]:
        """Undoes a failed step: its keys go, its requests end with `error`."""
        assert self._open is not None and self._open[0] is plan
        batch, self._open = self._open[1], None
        # Keys of all members go first, so that no block counts as registered while it is released.
        for block in self.pool.blocks:
            if block.key is not None and block.registered_step == plan.step:
                self.pool.unregister(block)
        return self._end_all([(member, "error") for member, _ in batch if not member.aborted])

    def _end_all(self, ending: list[tuple[ReferenceSequence, str]]) -> tuple[Finished, ...]:
        """Ends these and the aborted ones in order of admission, one after the other."""
        for sequence in self.waiting + self.running:
            if sequence.aborted:
                ending.append((sequence, "abort"))
        ending.sort(key=lambda pair: pair[0].serial)
        return tuple([self._finish(sequence, reason) for sequence, reason in ending])

    # ---- mixed (POLICIES.md, part A) ----

    def _serve_running(self, step: StepDraft) -> None:
        budget = self.config.max_num_batched_tokens
        for sequence in list(self.running):
            if step.num_tokens == budget:
                return
            if sequence not in self.running:
                return  # it and everybody behind it was preempted
            count = self._chunk(sequence.remaining, budget - step.num_tokens)
            if count == 0:
                continue
            needed = self._blocks_for(sequence.computed + count) - len(sequence.table)
            while needed > self.num_free_blocks:
                victim = self.running[-1]
                self._preempt(victim, step)
                if victim is sequence:
                    return
            self._take_and_schedule(sequence, needed, count, step)

    def _admit_mixed(self, step: StepDraft) -> None:
        config = self.config
        while self.waiting and step.num_tokens < config.max_num_batched_tokens:
            if len(self.running) >= config.max_num_seqs:
                return
            sequence = self.waiting[0]
            hits = self._hits(sequence)
            start = len(hits) * config.block_size
            count = self._chunk(
                len(sequence.tokens) - start, config.max_num_batched_tokens - step.num_tokens
            )
            headroom = config.watermark_blocks if self.running else 0
            free_hits = sum(1 for block in hits if block.ref_count == 0)
            checked = [start + count]
            if config.reserve_full_prompt:
                checked.append(len(sequence.tokens))
            for length in checked:
                needed = self._blocks_for(length) - len(hits) + free_hits
                if needed + headroom > self.num_free_blocks:
                    return
            self.waiting.remove(sequence)
            self._enter_running(sequence)
            self._take_hits(sequence, hits, step)
            needed = self._blocks_for(start + count) - len(hits)
            self._take_and_schedule(sequence, needed, count, step)

    def _chunk(self, remaining: int, budget_left: int) -> int:
        threshold = self.config.long_prefill_token_threshold
        if 0 < threshold < remaining:
            remaining = threshold
        return min(remaining, budget_left)

    def _take_and_schedule(
        self, sequence: ReferenceSequence, needed: int, count: int, step: StepDraft
    ) -> None:
        self._take_new(sequence, needed, step)
        self._register_full_blocks(sequence, count, self.step)
        step.batch.append((sequence, count))

    # ---- prefill_first (POLICIES.md, part B) ----

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
            step.batch.append((sequence, count))
            if count < todo:
                return
            self.waiting.remove(sequence)
            self._enter_running(sequence)

    def _decode_pass(self, step: StepDraft) -> None:
        config = self.config
        limit = config.max_num_seqs
        if config.bound_decode_tokens:
            limit = min(limit, config.max_num_batched_tokens)
        candidates = list(self.running)
        while candidates and len(step.batch) < limit:
            sequence = candidates.pop(0)
            needed = self._blocks_for(len(sequence.tokens)) - len(sequence.table)
            while needed > self.num_free_blocks:
                victim = candidates.pop() if candidates else sequence
                self._preempt(victim, step)
                if victim is sequence:
                    break
            else:
                self._take_new(sequence, needed, step)
                step.batch.append((sequence, 1))

    def _num_holders(self) -> int:
        return sum(1 for sequence in self.waiting + self.running if sequence.table)

    # ---- shared parts ----

    def _enter_running(self, sequence: ReferenceSequence) -> None:
        self.running.append(sequence)
        sequence.serial = self._next_serial
        self._next_serial += 1

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _key(self, sequence: ReferenceSequence, index: int) -> PrefixKey:
        end = (index + 1) * self.config.block_size
        return sequence.request.extra_keys, tuple(sequence.tokens[:end])

    def _hits(self, sequence: ReferenceSequence) -> list[ReferenceBlock]:
        hits: list[ReferenceBlock] = []
        if self.config.enable_prefix_caching:
            for index in range((len(sequence.tokens) - 1) // self.config.block_size):  # LAW-K7
                block = self.pool.lookup(self._key(sequence, index))
                if block is None:
                    break
                hits.append(block)
        return hits

    def _take_hits(
        self, sequence: ReferenceSequence, hits: list[ReferenceBlock], step: StepDraft
    ) -> None:
        same_step = sum(1 for block in hits if block.registered_step == self.step)
        free = sum(1 for block in hits if block.ref_count == 0)
        for block in hits:
            self.pool.take_hit(block)
        sequence.table = list(hits)
        sequence.computed = len(hits) * self.config.block_size
        sequence.sampled_since_admission = False
        step.admitted.append(
            Admission(
                sequence.request_id,
                sequence.computed,
                len(hits) - free - same_step,
                free,
                same_step,
                sequence.preempted_before,
            )
        )
        if hits:
            self._note_new_blocks(sequence, 0, hits, step)

    def _take_new(self, sequence: ReferenceSequence, count: int, step: StepDraft) -> None:
        if count <= 0:
            return
        first_index = len(sequence.table)
        taken = self.pool.take_new(count)
        sequence.table.extend(taken)
        self._note_new_blocks(sequence, first_index, taken, step)

    def _note_new_blocks(
        self,
        sequence: ReferenceSequence,
        first_index: int,
        blocks: list[ReferenceBlock],
        step: StepDraft,
    ) -> None:
        block_ids = tuple(block.block_id for block in blocks)
        last = step.new_blocks[-1] if step.new_blocks else None
        if last and last.request_id == sequence.request_id:  # hits and fresh blocks are one gain
            step.new_blocks[-1] = NewBlocks(
                last.request_id, last.first_index, last.block_ids + block_ids
            )
        else:
            step.new_blocks.append(NewBlocks(sequence.request_id, first_index, block_ids))

    def _register_full_blocks(self, sequence: ReferenceSequence, count: int, step: int) -> None:
        if not self.config.enable_prefix_caching:
            return
        size = self.config.block_size
        for index in range(sequence.computed // size, (sequence.computed + count) // size):
            self.pool.register(sequence.table[index], self._key(sequence, index), step)

    def _preempt(self, sequence: ReferenceSequence, step: StepDraft) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.table)
        sequence.table = []
        sequence.computed = 0
        sequence.preempted_before = True
        self.waiting.insert(0, sequence)
        step.preempted.append(sequence.request_id)

    def _append_token(self, sequence: ReferenceSequence, token: int) -> None:
        sequence.tokens.append(token)
        sequence.outputs.append(token)
        sequence.sampled_since_admission = True

    def _finish_reason(
        self, sequence: ReferenceSequence, token: int, stopped_outside: bool
    ) -> str | None:
        request, config = sequence.request, self.config
        stops = token in request.stop_token_ids and len(sequence.outputs) > request.min_tokens
        if stops or stopped_outside:
            return "stop"
        bounded = config.policy == "mixed" or config.bound_model_len
        if bounded and len(sequence.tokens) >= config.max_model_len:
            return "length"
        return "length" if len(sequence.outputs) >= request.max_tokens else None

    def _finish(self, sequence: ReferenceSequence, reason: str) -> Finished:
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
        self.pool.release(sequence.table)
        sequence.table = []
        return Finished(sequence.request_id, reason, tuple(sequence.outputs))

    def _entry(self, sequence: ReferenceSequence, count: int) -> Entry:
        return Entry(
            sequence.request_id,
            sequence.computed,
            count,
            sequence.computed + count == len(sequence.tokens),
            sequence.sampled_since_admission,
        )
