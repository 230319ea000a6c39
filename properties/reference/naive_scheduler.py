"""The reference scheduler: every policy by the book, the same calls as the kernel's."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from engine.core.errors import RequestRejected
from engine.core.plan import Finished, StepOutcome
from engine.core.request import Request, RequestId
from properties.reference.naive_mixed import NaiveMixed
from properties.reference.naive_prefill_first import NaivePrefillFirst
from properties.reference.naive_sequence import (
    ReferencePlan,
    ReferenceSequence,
    StepDraft,
    rejection,
)


class ReferenceScheduler(NaiveMixed, NaivePrefillFirst):
    """Every policy, one step ahead or not; slow on purpose."""

    def add(self, request: Request) -> None:
        """Queues a request, or rejects it before anything changes (LAW-C1)."""
        in_flight = [m.sequence.request_id for _, batch in self._open for m in batch]
        live = self.waiting_ids() + self.running_ids() + in_flight
        reason = rejection(self.config, request, live)
        if reason:
            raise RequestRejected(request.request_id, reason, "by the reference")
        self._enqueue(ReferenceSequence(request, self._next_arrival))
        self._next_arrival += 1

    def abort(self, request_id: RequestId) -> Finished | None:
        """Ends a request now, or at the commit of the open step (LAW-L8)."""
        sequence = self.find(request_id)
        if self._open:
            sequence.aborted = True
            return None
        return self._finish(sequence, "abort")

    def schedule(self) -> ReferencePlan:
        """Decides one step."""
        assert self.has_work and len(self._open) <= self.config.async_scheduling
        decided = StepDraft()
        if self.mixed:
            self._decide_mixed(decided)
        else:
            self._prefill_pass(decided)
            if not decided.batch:
                self._decode_pass(decided)
        plan = ReferencePlan(
            step=self.step,
            entries=tuple(decided.entries),
            new_blocks=tuple(decided.new_blocks),
            admitted=tuple(decided.admitted),
            preempted=tuple(decided.preempted),
            num_free_blocks=self.num_free_blocks,
        )
        self.step += 1
        for member in decided.batch:
            member.sequence.computed = member.first + member.count
            member.sequence.pending += member.samples
            member.sequence.sampled_since_admission |= member.samples
        self._open.append((plan, decided.batch))
        return plan

    def commit(
        self,
        plan: ReferencePlan,
        token_ids: Sequence[int],
        stopped: Collection[RequestId] = (),
    ) -> StepOutcome:
        """Applies the results of the oldest step in batch order."""
        assert self._open and self._open[0][0] is plan
        assert len(token_ids) == len(plan.sampled_ids)
        batch = self._open.pop(0)[1]
        tokens = iter(token_ids)
        sampled: list[RequestId] = []
        kept: list[int] = []
        ending: list[tuple[ReferenceSequence, str]] = []
        for member in batch:
            sequence = member.sequence
            token = next(tokens) if member.samples else None
            if sequence.ended:
                continue  # P-P3
            stale = sequence.preempted != member.preempted
            if not stale:
                sequence.pending -= member.samples
                if not self.mixed or member.samples:
                    self._register(sequence, member.first + member.count, plan.step)  # P-P5
            if token is not None and not sequence.aborted:
                sampled.append(sequence.request_id)
                kept.append(token)
                sequence.tokens.append(token)
                sequence.outputs.append(token)
                reason = self._finish_reason(sequence, token, sequence.request_id in stopped)
                if reason:
                    ending.append((sequence, reason))
        finished = self._end_all(ending)
        return StepOutcome(plan.step, tuple(sampled), tuple(kept), finished)

    def discard(self, plan: ReferencePlan) -> tuple[Finished, ...]:
        """Undoes a failed step and those after it: their keys go, their requests end."""
        assert self._open and self._open[0][0] is plan
        failed, self._open = self._open, []
        # Keys of all members go first, so that no block counts as registered while it is released.
        steps = {open_plan.step for open_plan, _ in failed}
        for block in self.pool.blocks:
            if block.key is not None and block.registered_step in steps:
                self.pool.unregister(block)
        members = {id(m.sequence): m.sequence for _, batch in failed for m in batch}
        live = [s for s in members.values() if not s.ended and not s.aborted]
        return self._end_all([(sequence, "error") for sequence in live])

    def _end_all(self, ending: list[tuple[ReferenceSequence, str]]) -> tuple[Finished, ...]:
        """Ends these and the aborted ones in order of admission, one after the other."""
        for sequence in self.waiting + self.running:
            if sequence.aborted:
                ending.append((sequence, "abort"))
        ending.sort(key=lambda pair: pair[0].serial)
        return tuple([self._finish(sequence, reason) for sequence, reason in ending])

    def _finish_reason(
        self, sequence: ReferenceSequence, token: int, stopped_outside: bool
    ) -> str | None:
        request, config = sequence.request, self.config
        stops = token in request.stop_token_ids and len(sequence.outputs) > request.min_tokens
        if stops or stopped_outside:
            return "stop"
        bounded = self.mixed or config.bound_model_len
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
        sequence.ended = True
        return Finished(sequence.request_id, reason, tuple(sequence.outputs))
