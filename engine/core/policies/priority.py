"""`priority`: vLLM V1's priority policy (rule P-R5 of docs/policies.md), on top of `mixed`."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from engine.core.policies.mixed import MixedPolicy
from engine.core.request import RequestId
from engine.core.sequence import Sequence
from engine.core.state import KernelState
from engine.core.step import Step


def _place(sequence: Sequence) -> tuple[int, int, int]:
    """Lower is tried first: by priority, arrival, and the order of requests of one arrival."""
    return sequence.request.priority, sequence.arrival, sequence.arrival_index


def _expendability(sequence: Sequence) -> tuple[int, int]:
    """The highest gives way first; the oldest in `running` among equals."""
    return sequence.request.priority, sequence.arrival


class PriorityQueue:
    """Waiting requests by priority, then arrival; a preempted one returns to its place (LAW-S9)."""

    def __init__(self) -> None:
        self._ordered: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._ordered)

    def __getitem__(self, index: int) -> Sequence:
        return self._ordered[index]

    def add(self, sequence: Sequence) -> None:
        """Takes in a request at its place."""
        insort(self._ordered, sequence, key=_place)

    put_back = add

    def popleft(self) -> Sequence:
        """Takes out the head."""
        return self._ordered.pop(0)

    def remove(self, sequence: Sequence) -> None:
        """Takes out any request."""
        del self._ordered[bisect_left(self._ordered, _place(sequence), key=_place)]


class PriorityPolicy(MixedPolicy):
    """Lower `priority` is served first; the least important running request gives way.

    A better waiting request never displaces a running one except for want of blocks.
    """

    def make_waiting(self) -> PriorityQueue:
        """Ordered by priority, then arrival."""
        return PriorityQueue()

    def serve(
        self, state: KernelState, step: Step, num_rows: int, chunks: list[tuple[Sequence, int]]
    ) -> None:
        """As `mixed` where blocks suffice; else one by one, because any request may give way."""
        if step.num_missing(state, num_rows, chunks) <= state.manager.pool.num_free:
            super().serve(state, step, num_rows, chunks)
            return
        served = self._serve_one_by_one(state, step)
        rows = [s for s, _ in served if s.request_id in state.decodes.members]
        parts = [pair for pair in served if pair[0].request_id in state.partial_prefills]
        step.settle(state, len(rows), parts)
        step.cache_full_blocks(state)

    def _serve_one_by_one(self, state: KernelState, step: Step) -> list[tuple[Sequence, int]]:
        """Serves in running order; a victim that was served already gives its tokens back."""
        served: dict[RequestId, tuple[Sequence, int]] = {}
        for sequence in [*state.running.values()]:
            request_id = sequence.request_id
            budget = step.token_budget - sum([count for _, count in served.values()])
            if budget == 0:
                break
            if request_id not in state.running:
                continue  # preempted by one before it
            if step.decodes_only and request_id in state.partial_prefills:
                continue
            count = self._tokens_now(state, sequence, budget)
            if count and self._make_room(state, step, sequence, count, served):
                served[request_id] = (sequence, count)
        return [*served.values()]

    def _make_room(
        self,
        state: KernelState,
        step: Step,
        asker: Sequence,
        count: int,
        served: dict[RequestId, tuple[Sequence, int]],
    ) -> bool:
        """Takes the asker's blocks, preempting while there are too few; False if it gave way."""
        manager = state.manager
        num_tokens = state.num_computed_tokens(asker) + count
        while manager.missing(asker, num_tokens) > manager.pool.num_free:
            victim = max(state.running.values(), key=_expendability)
            entry = served.pop(victim.request_id, None)
            if entry is None:
                state.preempt(victim)
            else:
                self._withdraw(state, step, *entry)
            step.preempted.append(victim)
            if victim is asker:
                return False
        step.note_blocks(asker, manager.extend(asker, num_tokens))
        # At once, so that a victim's blocks go back into the queue as vLLM's do (LAW-K9).
        step.cache_served(state, asker, count)
        return True

    def _withdraw(self, state: KernelState, step: Step, victim: Sequence, count: int) -> None:
        """Preempts one that was served in this step; the keys that its entry gave are taken back.

        Nobody will compute what the entry was to write. vLLM 0.33 leaves these keys in place, and
        a later request can hit blocks that were never written (LAW-V1).
        """
        manager = state.manager
        start = state.num_computed_tokens(victim)
        size = manager.block_size
        unwritten = victim.block_table[start // size : (start + count) // size]
        state.preempt(victim)
        step.forget_new_blocks(victim.request_id)
        for block_id in unwritten:
            manager.pool.unregister(block_id)
            manager.cached_in_step.pop(block_id, None)
