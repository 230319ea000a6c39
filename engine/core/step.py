"""One step under construction: serving what runs, caching full blocks, booking the decisions."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.core.plan import Admission, Chunk, NewBlocks, StepPlan
from engine.core.request import RequestId
from engine.core.sequence import Sequence
from engine.core.state import KernelState


@dataclass(slots=True)
class Step:
    """What the policy has decided so far; `token_budget` is what is left of the token budget."""

    token_budget: int
    tokens_open: bool  # an uncommitted plan still samples tokens
    keys_when_scheduled: bool  # not at the commit
    decodes_only: bool = False  # prompts are held back in this step (P-R4)
    num_rows: int = 0
    unscheduled: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)  # with number of tokens
    new_blocks: list[NewBlocks] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    uncached: list[tuple[Sequence, int]] = field(default_factory=list)  # get keys at the commit

    def serve(self, state: KernelState, num_rows: int, chunks: list[tuple[Sequence, int]]) -> None:
        """Gives blocks to the oldest `num_rows` decodes and the chunks, oldest first.

        When blocks run out the newest running sequence is preempted, at last the asker itself.
        """
        for sequence, num_tokens in self._asking(state, num_rows, chunks):
            if sequence.request_id not in state.running:
                break  # preempted in this step, and so is everybody behind it
            if not self._make_room(state, sequence, state.manager.missing(sequence, num_tokens)):
                break
            self.note_blocks(sequence, state.manager.extend(sequence, num_tokens))
            if self.tokens_open and self.keys_when_scheduled:
                self._cache_before_newest(state, sequence, num_tokens)
        if self.preempted:
            chunks = [pair for pair in chunks if pair[0].request_id in state.partial_prefills]
            num_rows = min(num_rows, len(state.decodes))
        self.settle(state, num_rows, chunks)

    def num_missing(
        self, state: KernelState, num_rows: int, chunks: list[tuple[Sequence, int]]
    ) -> int:
        """Blocks that `serve` would take if none were short."""
        missing = state.manager.missing
        return sum([missing(*asker) for asker in self._asking(state, num_rows, chunks)])

    def settle(self, state: KernelState, num_rows: int, chunks: list[tuple[Sequence, int]]) -> None:
        """Fixes the decodes and chunks of this step; they hold all the blocks they need."""
        decodes = state.decodes
        self.unscheduled = []
        if num_rows < len(decodes):
            self.unscheduled = [*decodes.members.values()][num_rows:]
        self.num_rows, self.chunks = num_rows, chunks
        self.token_budget -= num_rows + sum([count for _, count in chunks])

    def _asking(
        self, state: KernelState, num_rows: int, chunks: list[tuple[Sequence, int]]
    ) -> list[tuple[Sequence, int]]:
        """Those who may need a block, oldest first, with the tokens that they must have room for.

        A decode needs one exactly when its position begins a block (LAW-B7), so only the members
        that the calendar says are due are looked at.
        """
        decodes = state.decodes
        due = decodes.due(1 % decodes.block_size)
        if num_rows < len(decodes):
            first_out = [*decodes.members.values()][num_rows]
            due = [s for s in due if s.admission_index < first_out.admission_index]
        asking = [(sequence, decodes.num_tokens(sequence)) for sequence in due]
        if chunks:
            asking += [(sequence, sequence.num_computed_tokens + n) for sequence, n in chunks]
            asking.sort(key=_admission_of_pair)
        return asking

    def _make_room(self, state: KernelState, asker: Sequence, missing: int) -> bool:
        """Preempts until `missing` blocks are free (LAW-T4); False if the asker gave way."""
        while state.manager.pool.num_free < missing:
            victim = state.newest()
            state.preempt(victim)
            self.preempted.append(victim)
            if victim is asker:
                return False
        return True

    def note_blocks(self, sequence: Sequence, block_ids: tuple[int, ...]) -> None:
        """Records the blocks that a table has just gained at its end."""
        if block_ids:
            first = len(sequence.block_table) - len(block_ids)
            self.new_blocks.append(NewBlocks(sequence.request_id, first, block_ids))

    def forget_new_blocks(self, request_id: RequestId) -> None:
        """Takes back what was noted for a sequence that is preempted after it was served."""
        self.new_blocks = [new for new in self.new_blocks if new.request_id != request_id]

    def filled(self, state: KernelState) -> list[tuple[Sequence, int]]:
        """The served sequences whose blocks this step may fill, with their computed tokens."""
        filled = self._rows_at(state, 0) if self.num_rows else []
        if self.chunks:
            filled += [(sequence, sequence.num_computed_tokens + n) for sequence, n in self.chunks]
            filled.sort(key=_admission_of_pair)
        return filled

    def cache_full_blocks(self, state: KernelState) -> None:
        """Gives blocks full of known tokens their keys, in batch order (LAW-K1, P-P5)."""
        if self.tokens_open and self.num_rows:
            self._cache_known_blocks(state)
            return
        decodes, manager = state.decodes, state.manager
        for sequence, num_computed_tokens in self.filled(state):
            decodes.sync_outputs(sequence)
            manager.cache_full_blocks(sequence, num_computed_tokens)

    def _cache_known_blocks(self, state: KernelState) -> None:
        """The same while a plan is open, so that the newest token of its decodes is not known.

        The block that such a decode fills now waits for the commit, or for the next step that
        serves it (`_cache_before_newest`), whichever comes first.
        """
        decodes, manager = state.decodes, state.manager
        for sequence, num_computed_tokens in self.filled(state):
            if sequence.decoding and decodes.num_known(sequence) < num_computed_tokens:
                self.uncached.append((sequence, num_computed_tokens))
                continue
            decodes.sync_outputs(sequence)
            manager.cache_full_blocks(sequence, num_computed_tokens)

    def _cache_before_newest(self, state: KernelState, sequence: Sequence, num_tokens: int) -> None:
        """Keys for the blocks of a decode that its newest token, in flight, does not belong to.

        A decode that begins a block filled the one before it a step ago, and by now its tokens are
        known.
        """
        if sequence.decoding and state.manager.caching:
            state.decodes.sync_outputs(sequence)
            state.manager.cache_full_blocks(sequence, num_tokens - 1)

    def cache_served(self, state: KernelState, sequence: Sequence, count: int) -> None:
        """Keys for one sequence that has just been given room for `count` more tokens."""
        state.decodes.sync_outputs(sequence)
        num_computed_tokens = state.num_computed_tokens(sequence) + count
        state.manager.cache_full_blocks(sequence, min(num_computed_tokens, sequence.num_tokens))

    def _rows_at(self, state: KernelState, remainder: int) -> list[tuple[Sequence, int]]:
        """The served decodes whose tokens leave `remainder` modulo the block size, with these."""
        decodes = state.decodes
        rows = decodes.due(remainder)
        if self.unscheduled:
            rows = [s for s in rows if s.admission_index < self.unscheduled[0].admission_index]
        return [(sequence, decodes.num_tokens(sequence)) for sequence in rows]

    def book(self, state: KernelState) -> list[Sequence]:
        """Grows the computed counts; returns the sequences that this step brings to their limit."""
        decodes = state.decodes
        if self.num_rows:
            decodes.advance(self.unscheduled)
        for sequence, count in self.chunks:
            sequence.num_computed_tokens += count
            if sequence.num_computed_tokens == sequence.num_tokens:
                state.partial_prefills.pop(sequence.request_id, None)
                decodes.join(sequence, sequence.num_tokens + 1)  # LAW-S12: one token is sampled
        return decodes.take_at_limit()

    def plan(self, number: int, state: KernelState) -> StepPlan:
        """The frozen plan; made before `book`, from the state that the step starts from."""
        batch = state.decodes.make_batch(self.num_rows)
        chunks = tuple(self._plan_chunks(state))
        return StepPlan(
            step=number,
            clock=state.decodes.clock,
            decode=batch,
            chunks=chunks,
            new_blocks=tuple(self.new_blocks),
            admitted=tuple(self.admitted),
            preempted=tuple([sequence.request_id for sequence in self.preempted]),
            num_tokens=self.num_rows + sum([chunk.num_tokens for chunk in chunks]),
            num_running=len(state.running),
            num_waiting=len(state.waiting),
            num_free_blocks=state.manager.pool.num_free,
            copies=state.manager.take_copies(),
        )

    def _plan_chunks(self, state: KernelState) -> list[Chunk]:
        if not self.chunks:
            return []
        rows = [*state.decodes.members.values()][: self.num_rows]
        newest = rows[-1].admission_index if rows else 0
        planned = []
        for index, (sequence, count) in enumerate(self.chunks):
            older = self.num_rows
            if sequence.admission_index < newest:  # only with a long-prefill threshold
                older = sum(1 for row in rows if row.admission_index < sequence.admission_index)
            first = sequence.num_computed_tokens
            samples = first + count == sequence.num_tokens
            planned.append(
                Chunk(
                    sequence.request_id,
                    first,
                    count,
                    older + index,
                    samples,
                    sequence.prompt,
                    sequence.output_token_ids,
                )
            )
        return planned


@dataclass(slots=True)
class OpenStep:
    """A plan between schedule and commit, with what only the kernel needs to remember of it."""

    plan: StepPlan
    sampled_ids: Seq[RequestId]  # those of the plan, which puts them together anew each time
    chunk_sequences: list[Sequence]
    ending: list[Sequence]  # reach their limit with this step's token
    uncached: list[tuple[Sequence, int]]  # get their keys at the commit
    cached: list[int]  # blocks that got their key when the step was scheduled
    # Ended while the step is open: their tokens are thrown away (P-P3).
    dropped: set[RequestId] = field(default_factory=set)
    horizon: int = 0  # steps that are certain from here on; 0 = not asked for yet

    def has(self, request_id: RequestId) -> bool:
        """Whether the request is in this step's batch."""
        plan = self.plan
        if any(chunk.request_id == request_id for chunk in plan.chunks):
            return True
        return request_id in plan.decode.request_ids


def _admission_of_pair(pair: tuple[Sequence, int]) -> int:
    return pair[0].admission_index
