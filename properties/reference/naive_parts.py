"""What every pass of the reference scheduler uses: queues, blocks, keys, preemption, entries."""

from __future__ import annotations

from engine.core.config import KernelConfig
from engine.core.plan import Admission, Entry, NewBlocks
from engine.core.request import RequestId
from properties.reference.naive_pool import PrefixKey, ReferenceBlock, ReferencePool
from properties.reference.naive_sequence import Member, ReferencePlan, ReferenceSequence, StepDraft


class NaiveParts:
    """One sequence object per request, one list per queue; slow on purpose."""

    def __init__(self, config: KernelConfig) -> None:
        self.config = config
        self.mixed = mixed = config.policy != "prefill_first"
        self.by_priority = config.policy == "priority"
        self.pool = ReferencePool(
            config.num_blocks, unregistered_first=mixed, newest_copy=not mixed
        )
        self.waiting: list[ReferenceSequence] = []
        self.running: list[ReferenceSequence] = []
        self.step = 0
        self._next_serial = 1
        self._next_arrival = 0
        self._open: list[tuple[ReferencePlan, list[Member]]] = []
        self._since_prefill = 0  # non-empty steps since one that carried prefill; 0 = none yet
        self._left_waiting = False

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

    def _enqueue(self, sequence: ReferenceSequence) -> None:
        self.waiting.append(sequence)
        if self.by_priority:
            self.waiting.sort(key=lambda other: (*other.rank, other.arrival))

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
                sequence.preempted > 0,
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

    def _register(self, sequence: ReferenceSequence, end: int, step: int) -> None:
        """Keys for the blocks that are full with `end` tokens, as far as these are known."""
        if not self.config.enable_prefix_caching:
            return
        num_full = min(end, len(sequence.tokens)) // self.config.block_size
        for index in range(num_full):
            if sequence.table[index].key is None:
                self.pool.register(sequence.table[index], self._key(sequence, index), step)

    def _preempt(self, sequence: ReferenceSequence, step: StepDraft) -> None:
        unwritten: list[ReferenceBlock] = []
        if step.withdraw(sequence):
            unwritten = sequence.table[sequence.computed // self.config.block_size :]
        self.running.remove(sequence)
        self.pool.release(sequence.table)
        for block in unwritten:  # nobody computes what the entry was to write
            self.pool.unregister(block)
        sequence.table = []
        sequence.computed = sequence.pending = 0
        sequence.preempted += 1
        sequence.sampled_since_admission = False
        if self.by_priority:
            self._enqueue(sequence)
        else:
            self.waiting.insert(0, sequence)
        step.preempted.append(sequence.request_id)

    def _waits_for_last_token(self, sequence: ReferenceSequence) -> bool:
        """P-P2: the token in flight ends it for its length."""
        if not sequence.pending:
            return False
        total = len(sequence.tokens) + sequence.pending
        outputs = len(sequence.outputs) + sequence.pending
        bounded = self.mixed or self.config.bound_model_len
        return outputs >= sequence.request.max_tokens or (
            bounded and total >= self.config.max_model_len
        )

    def _schedule(self, sequence: ReferenceSequence, count: int, step: StepDraft) -> None:
        samples = count == sequence.remaining
        first = sequence.computed
        decodes = sequence.sampled_since_admission
        step.batch.append(Member(sequence, first, count, samples, sequence.preempted))
        step.entries.append(Entry(sequence.request_id, first, count, samples, decodes))
