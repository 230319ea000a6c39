"""Defects of the policies' decisions: laws S and T, LAW-L1 to LAW-L3."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from engine.core.block_manager import Hits
from engine.core.config import KernelConfig
from engine.core.plan import StepPlan
from engine.core.policies.mixed import MixedPolicy
from engine.core.policies.prefill_first import PrefillFirstPolicy
from engine.core.request import Request, RequestId
from engine.core.sequence import Sequence
from engine.core.state import KernelState
from engine.core.step import Step
from properties.defects.planting import Mutant, Planted, fcfs


class _NoBudgetPolicy(MixedPolicy):
    def _admit_next(self, state: KernelState, step: Step) -> bool:
        budget = step.token_budget
        admitted = super()._admit_next(state, step)
        step.token_budget = budget
        return admitted


class BudgetNeverShrinks(Planted):
    """Admissions do not use up the token budget."""

    mixed_class = _NoBudgetPolicy


class IgnoresSeats(Planted):
    """max_num_seqs bounds nothing."""

    def __init__(self, config: KernelConfig) -> None:
        super().__init__(config)
        self.state.config = replace(config, max_num_seqs=10**6)


class _PastTheEndPolicy(PrefillFirstPolicy):
    def _prefill_next(self, state: KernelState, step: Step) -> bool:
        before = len(step.chunks)
        fresh = bool(state.waiting) and not state.waiting[0].block_table
        done = super()._prefill_next(state, step)
        if fresh and len(step.chunks) > before:
            sequence, count = step.chunks[-1]
            hit_tokens = step.admitted[-1].hit_tokens
            step.chunks[-1] = (sequence, count + min(hit_tokens, step.token_budget))
        return done


class CountsBeforeHits(Planted):
    """The number of tokens is fixed before the hits are known (nano-vLLM's 812eb1c)."""

    prefill_first_class = _PastTheEndPolicy


class _KeepsRunningState(KernelState):
    def preempt(self, sequence: Sequence) -> None:
        super().preempt(sequence)
        self.running = {**self.running, sequence.request_id: sequence}


class VictimStaysRunning(Planted):
    """A preempted request is in waiting and in running."""

    state_class = _KeepsRunningState


class CountsSampledAsComputed(Planted):
    """The newest sampled token counts as computed."""

    def num_computed_tokens(self, request_id: RequestId) -> int:
        """One too many while it decodes."""
        computed = super().num_computed_tokens(request_id)
        return computed + self._sequence(request_id).decoding


class _VictimLastState(KernelState):
    def preempt(self, sequence: Sequence) -> None:
        super().preempt(sequence)
        fcfs(self).rotate(-1)


class VictimGoesToTheBack(Planted):
    """A preempted request joins the back of waiting."""

    state_class = _VictimLastState


class _AdmitsWhilePreemptingPolicy(MixedPolicy):
    def fill(self, state: KernelState, step: Step) -> None:
        super().fill(state, step)
        if step.preempted:
            while self._admit_next(state, step):
                pass


class AdmitsInPreemptingStep(Planted):
    """A step that preempts admits as well."""

    mixed_class = _AdmitsWhilePreemptingPolicy


class _VictimInBatchStep(Step):
    __slots__ = ()

    def serve(self, state: KernelState, num_rows: int, chunks: list[tuple[Sequence, int]]) -> None:
        super().serve(state, num_rows, chunks)
        if self.preempted:
            self.chunks = [*self.chunks, (self.preempted[0], 1)]


class VictimStaysInBatch(Planted):
    """A victim's tokens are not taken out of the step (vLLM #23347)."""

    step_class = _VictimInBatchStep


class _CrumbsPolicy(MixedPolicy):
    def _chunk(self, state: KernelState, remaining: int, budget: int) -> int:
        return min(super()._chunk(state, remaining, budget), 1)


class ManyHalfDonePrompts(Planted):
    """Prompts are cut although budget is left, so that several are half done."""

    mixed_class = _CrumbsPolicy


class _CutsAnyPolicy(PrefillFirstPolicy):
    def _prefill_next(self, state: KernelState, step: Step) -> bool:
        earlier, step.chunks = step.chunks, []
        if len(earlier) >= state.config.max_num_seqs:
            step.chunks = earlier
            return False
        done = super()._prefill_next(state, step)
        step.chunks = earlier + step.chunks
        return done


class CutsAnyPrompt(Planted):
    """`prefill_first` cuts prompts that are not the first of a step."""

    prefill_first_class = _CutsAnyPolicy


class NewestArrivalFirst(Planted):
    """New requests join the front of waiting."""

    def add(self, request: Request) -> None:
        """Queues at the wrong end."""
        super().add(request)
        fcfs(self.state).rotate(1)


class _OldestVictimState(KernelState):
    def newest(self) -> Sequence:
        for sequence in self.running.values():
            if sequence.request_id in self.decodes.members or (
                sequence.request_id in self.partial_prefills
            ):
                return sequence
        return super().newest()


class PreemptsOldest(Planted):
    """The victim is the oldest running request."""

    state_class = _OldestVictimState


class SamplesUnfinishedChunk(Planted):
    """Every chunk samples a token, finished or not (mini-sglang ef4367f)."""

    def schedule(self) -> StepPlan:
        """Marks all chunks as sampling."""
        plan = super().schedule()
        chunks = tuple([replace(chunk, samples=True) for chunk in plan.chunks])
        wrong = replace(plan, chunks=chunks)
        self._open[-1].plan = wrong
        return wrong


class _OneAdmissionPolicy(MixedPolicy):
    def _admit_next(self, state: KernelState, step: Step) -> bool:
        return not step.admitted and super()._admit_next(state, step)


class AdmitsOnePerStep(Planted):
    """At most one request is admitted in a step."""

    mixed_class = _OneAdmissionPolicy


class WastesBudget(Planted):
    """The last token of the budget is never used."""

    def _begin_step(self, tokens_open: bool) -> Step:
        step = super()._begin_step(tokens_open)
        step.token_budget = max(1, step.token_budget - 1)
        return step


class _GreedyVictimStep(Step):
    __slots__ = ()

    def _make_room(self, state: KernelState, asker: Sequence, missing: int) -> bool:
        return super()._make_room(state, asker, missing + 1 if missing else 0)


class PreemptsOneMore(Planted):
    """One block more than needed is made free by preemption."""

    step_class = _GreedyVictimStep


class _NoWatermarkPolicy(MixedPolicy):
    def _needed(self, state: KernelState, sequence: Sequence, hits: Hits, budget: int) -> int:
        watermark = state.config.watermark_blocks if state.running else 0
        return super()._needed(state, sequence, hits, budget) - watermark


class IgnoresWatermark(Planted):
    """Admission does not leave the watermark free."""

    mixed_class = _NoWatermarkPolicy


class _AsksTooMuchPolicy(MixedPolicy):
    def _needed(self, state: KernelState, sequence: Sequence, hits: Hits, budget: int) -> int:
        return super()._needed(state, sequence, hits, budget) + bool(state.running)


class AsksOneBlockTooMany(Planted):
    """Admission fails when exactly the needed blocks are free."""

    mixed_class = _AsksTooMuchPolicy


class _PausesPolicy(MixedPolicy):
    def fill(self, state: KernelState, step: Step) -> None:
        if len(state.waiting) < 2 or state.running:
            super().fill(state, step)


class PausesWithFullQueue(Planted):
    """Nothing is scheduled when two requests wait and none runs."""

    mixed_class = _PausesPolicy


class DeadlocksSilently(PausesWithFullQueue):
    """Two waiting requests block each other for ever, in steps without tokens (Dynamo #11016)."""

    def _check_progress(self, plan: StepPlan) -> None:
        pass


class _SkipsPolicy(MixedPolicy):
    def _admit_next(self, state: KernelState, step: Step) -> bool:
        for _ in range(len(state.waiting)):
            if super()._admit_next(state, step):
                return True
            fcfs(state).rotate(-1)
        return False


class SkipsHeadOfLine(Planted):
    """A request that does not fit is overtaken by those behind it."""

    mixed_class = _SkipsPolicy


class _MoodyPolicy(MixedPolicy):
    calls: ClassVar[int] = 0

    def _admit_next(self, state: KernelState, step: Step) -> bool:
        type(self).calls += 1
        if self.calls % 3 == 0 and state.running:
            return False
        return super()._admit_next(state, step)


class KeepsClassState(Planted):
    """A counter on a class decides, so that two schedulers in one process disturb each other."""

    mixed_class = _MoodyPolicy


class HorizonTooFar(Planted):
    """decode_horizon promises one step more than is certain."""

    def decode_horizon(self, plan: StepPlan) -> int:
        """One too many."""
        horizon = super().decode_horizon(plan)
        return horizon + 1 if horizon > 1 else 1


MUTANTS = (
    Mutant("S1", BudgetNeverShrinks, "BUG-C76", "mixed"),
    Mutant("S2", IgnoresSeats, "BUG-C11, BUG-B03"),
    Mutant("S3", CountsBeforeHits, "nano-vLLM 812eb1c", "prefill_first"),
    Mutant("S4", VictimStaysRunning, "own"),
    Mutant("S5", CountsSampledAsComputed, "own"),
    Mutant("S6", VictimGoesToTheBack, "BUG-C25"),
    Mutant("S6", AdmitsInPreemptingStep, "own", "mixed"),
    Mutant("S7", VictimStaysInBatch, "BUG-C23, BUG-C86"),
    Mutant("S8", ManyHalfDonePrompts, "BUG-C65", "mixed"),
    Mutant("T3", CutsAnyPrompt, "own", "prefill_first"),
    Mutant("S9", NewestArrivalFirst, "own"),
    Mutant("S9", SkipsHeadOfLine, "BUG-C25", "mixed"),
    Mutant("S10", PreemptsOldest, "own"),
    Mutant("L2", PreemptsOldest, "BUG-C29"),
    Mutant("S12", SamplesUnfinishedChunk, "BUG-C77"),
    Mutant("T2", AdmitsOnePerStep, "own", "mixed"),
    Mutant("T2", AsksOneBlockTooMany, "own", "mixed"),
    Mutant("T3", WastesBudget, "own"),
    Mutant("T4", PreemptsOneMore, "vLLM #49674"),
    Mutant("T5", IgnoresWatermark, "own", "mixed"),
    Mutant("L1", PausesWithFullQueue, "BUG-C85", "mixed"),
    Mutant("L3", DeadlocksSilently, "Dynamo #11016", "mixed"),
    Mutant("RUN", HorizonTooFar, "own"),
)
