"""One step under construction: serving what runs, caching full blocks, booking the decisions."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.plan import Admission, Chunk, NewBlocks, StepPlan
from engine.core.request import RequestId
from engine.core.sequence import Sequence
from engine.core.state import KernelState


@dataclass(slots=True)
class Step:
    """What the policy has decided so far; `token_budget` is what is left of the token budget."""

    token_budget: int
    tokens_open: bool  # an uncommitted plan still samples the newest token of every decode
    num_rows: int = 0
    unscheduled: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)  # with number of tokens
    new_blocks: list[NewBlocks] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    uncached: list[tuple[Sequence, int]] = field(default_factory=list)  # cached at the commit

    def serve(self, state: KernelState, num_rows: int, chunks: list[tuple[Sequence, int]]) -> None:
        """Gives blocks to the oldest `num_rows` decodes and the chunks, oldest first.

        When blocks run out the newest running sequence is preempted, at last the asker itself.
        """
        manager, decodes = state.manager, state.decodes
        due = decodes.due(1 % decodes.block_size)  # LAW-B7
        unscheduled: list[Sequence] = []
        if num_rows < len(decodes):
            unscheduled = [*decodes.members.values()][num_rows:]
            due = [
                sequence
                for sequence in due
                if sequence.admission_index < unscheduled[0].admission_index
            ]
        asking = [(sequence, decodes.num_tokens(sequence)) for sequence in due]
        if chunks:
            asking += [
                (sequence, sequence.num_computed_tokens + count) for sequence, count in chunks
            ]
            asking.sort(key=_admission_of_pair)
        for sequence, num_tokens in asking:
            if sequence.request_id not in state.running:
                break  # preempted in this step, and so is everybody behind it
            if not self._make_room(state, sequence, manager.missing(sequence, num_tokens)):
                break
            self.note_blocks(sequence, manager.extend(sequence, num_tokens))
        if self.preempted:
            unscheduled = [s for s in unscheduled if s.request_id in decodes.members]
            chunks = [pair for pair in chunks if pair[0].request_id in state.partial_prefills]
            num_rows = min(num_rows, len(decodes))
        self.num_rows, self.unscheduled, self.chunks = num_rows, unscheduled, chunks
        self.token_budget -= num_rows + sum(count for _, count in chunks)

    def _make_room(self, state: KernelState, asker: Sequence, missing: int) -> bool:
        """Preempts until `missing` blocks are free (LAW-T4); False if it took the asker itself."""
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

    def filled(self, state: KernelState) -> list[tuple[Sequence, int]]:
        """The served sequences whose blocks this step may fill, with their computed tokens."""
        decodes = state.decodes
        rows = decodes.due(0) if self.num_rows else []
        if self.unscheduled:
            rows = [s for s in rows if s.admission_index < self.unscheduled[0].admission_index]
        filled = [(sequence, decodes.num_tokens(sequence)) for sequence in rows]
        if self.chunks:
            filled += [
                (sequence, sequence.num_computed_tokens + count) for sequence, count in self.chunks
            ]
            filled.sort(key=_admission_of_pair)
        return filled

    def cache_full_blocks(self, state: KernelState) -> None:
        """Gives blocks that fill up in this step their keys, once all their tokens are known."""
        for sequence, num_computed_tokens in self.filled(state):
            if self.tokens_open and sequence.decoding:
                self.uncached.append((sequence, num_computed_tokens))
            else:
                state.decodes.sync_outputs(sequence)
                state.manager.cache_full_blocks(sequence, num_computed_tokens)

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
    chunk_sequences: list[Sequence]
    ending: list[Sequence]  # reach their limit with this step's token
    uncached: list[tuple[Sequence, int]]
    cached: list[int]  # blocks that got their key when the step was scheduled
    voided: list[Sequence] = field(default_factory=list)  # ended meanwhile; blocks still written

    def has(self, request_id: RequestId) -> bool:
        """Whether the request is in this step's batch."""
        plan = self.plan
        if any(chunk.request_id == request_id for chunk in plan.chunks):
            return True
        return request_id in plan.decode.request_ids


def _admission_of_pair(pair: tuple[Sequence, int]) -> int:
    return pair[0].admission_index
