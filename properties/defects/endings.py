"""Defects of how requests begin and end: LAW-L4 to LAW-L8, LAW-C1 and LAW-E4."""

from __future__ import annotations

from dataclasses import replace

from engine.core.block_manager import Hits
from engine.core.config import KernelConfig
from engine.core.errors import RequestRejected
from engine.core.plan import Finished
from engine.core.policies.mixed import MixedPolicy
from engine.core.policies.prefill_first import PrefillFirstPolicy
from engine.core.request import Request, RequestId
from engine.core.sequence import Sequence
from engine.core.state import KernelState
from engine.core.step import Step
from properties.defects.planting import Mutant, Planted


class _DropsPolicy(MixedPolicy):
    def _admit_next(self, state: KernelState, step: Step) -> bool:
        if super()._admit_next(state, step):
            return True
        if (
            state.waiting
            and step.token_budget
            and state.running
            and not state.manager.pool.num_free
        ):
            del state.sequences[state.waiting.popleft().request_id]
        return False


class DropsWhenFull(Planted):
    """A request that finds no free block is forgotten (inference-sim #183)."""

    mixed_class = _DropsPolicy


class OneTokenTooMany(Planted):
    """A request ends one token after its limit."""

    def add(self, request: Request) -> None:
        """Sets the limit one too high."""
        super().add(request)
        self.state.sequences[request.request_id].limit += 1


class ReturnsOneTokenLess(Planted):
    """The last token is missing from the returned outputs."""

    def _retire(self, sequence: Sequence, reason: str) -> Finished:
        ended = super()._retire(sequence, reason)
        return ended._replace(output_token_ids=ended.output_token_ids[:-1])


class AbortLeaksBlocks(Planted):
    """An abort forgets the blocks of its request."""

    def abort(self, request_id: RequestId) -> Finished | None:
        """Empties the table without a release."""
        if not self._open:
            self._sequence(request_id).block_table = []
        return super().abort(request_id)


class RejectsJustFitting(Planted):
    """A request that needs exactly the whole pool is rejected."""

    def add(self, request: Request) -> None:
        """Compares with >= where > is right."""
        config = self.config
        outputs = min(request.max_tokens, config.max_model_len - len(request.prompt))
        written = len(request.prompt) + outputs - 1
        if -(-written // config.block_size) == config.num_blocks:
            raise RequestRejected(request.request_id, "pool_too_small", "just fits")
        super().add(request)


class AcceptsImpossible(Planted):
    """A request that can never fit is accepted (vLLM #39734)."""

    def __init__(self, config: KernelConfig) -> None:
        super().__init__(replace(config, reject_impossible=False))


class _ForgetsTokenState(KernelState):
    def preempt(self, sequence: Sequence) -> None:
        super().preempt(sequence)
        if sequence.output_token_ids:
            sequence.output_token_ids.pop()


class PreemptionLosesToken(Planted):
    """A preempted request loses its newest token (nano-vLLM's 812eb1c)."""

    state_class = _ForgetsTokenState


class _TakesUnscheduledPolicy(PrefillFirstPolicy):
    def _prefill_next(self, state: KernelState, step: Step) -> bool:
        done = super()._prefill_next(state, step)
        if not done and step.chunks and state.waiting:
            sequence = state.waiting[0]
            hits = state.manager.lookup(sequence)
            if not sequence.block_table and self._needed(state, sequence, hits) <= (
                state.manager.pool.num_free
            ):
                state.manager.admit(sequence, hits, sequence.num_tokens)
        return done


class AllocatesUnscheduled(Planted):
    """Blocks are taken for a request that the step then does not schedule (nano-vLLM's 44a51af)."""

    prefill_first_class = _TakesUnscheduledPolicy


class _NoHitCapacityPolicy(PrefillFirstPolicy):
    def _needed(self, state: KernelState, sequence: Sequence, hits: Hits) -> int:
        return state.manager.blocks_for(sequence.num_tokens)


class CapacityIgnoresHits(Planted):
    """The capacity test asks for the blocks that hits already provide (nano-vLLM's 2f21442)."""

    prefill_first_class = _NoHitCapacityPolicy


class KeepsAborting(Planted):
    """A failed step forgets the aborts that waited for it (our own defect of 2026-11-29)."""

    def _retire(self, sequence: Sequence, reason: str) -> Finished:
        return super()._retire(sequence, "error" if reason == "abort" else reason)


class IgnoresStops(Planted):
    """No token ends a request before its length does."""

    def add(self, request: Request) -> None:
        """Forgets the stop ids."""
        super().add(replace(request, stop_token_ids=frozenset()))


MUTANTS = (
    Mutant("L4", DropsWhenFull, "BUG-C83", "mixed"),
    Mutant("L6", OneTokenTooMany, "own"),
    Mutant("L6", IgnoresStops, "own"),
    Mutant("L6", KeepsAborting, "own"),
    Mutant("L7", ReturnsOneTokenLess, "own"),
    Mutant("L8", AbortLeaksBlocks, "own"),
    Mutant("C1", RejectsJustFitting, "own"),
    Mutant("C1", AcceptsImpossible, "BUG-C27, BUG-B01, BUG-B02"),
    Mutant("E4", PreemptionLosesToken, "nano-vLLM 812eb1c"),
    Mutant("B8", AllocatesUnscheduled, "nano-vLLM 44a51af", "prefill_first"),
    Mutant("T2", CapacityIgnoresHits, "nano-vLLM 2f21442", "prefill_first"),
)
