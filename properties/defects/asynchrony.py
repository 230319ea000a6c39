"""Defects that show only while a step is decided before the last one's tokens are known."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from engine.core.config import KernelConfig
from engine.core.plan import Finished, StepPlan
from engine.core.request import Request, RequestId
from engine.core.sequence import Sequence
from engine.core.state import KernelState
from engine.core.step import OpenStep, Step
from properties.defects.planting import Mutant, Planted


class OverrunsKnownEnds(Planted):
    """A request whose token in flight is its last one is scheduled once more."""

    def add(self, request: Request) -> None:
        """Sets the limit of the decode set, but not of the end, one too high."""
        super().add(request)
        self.state.sequences[request.request_id].limit += 1

    def _commit(self, record: OpenStep, token_ids: Seq[int], stopped: Seq[RequestId]):  # type: ignore[no-untyped-def, override]  # noqa: ANN202
        ends = [
            request_id
            for request_id in record.plan.sampled_ids
            if (sequence := self.state.sequences.get(request_id)) is not None
            and self.state.decodes.num_known(sequence) + 1 >= sequence.limit - 1
        ]
        return super()._commit(record, token_ids, [*stopped, *ends])  # type: ignore[arg-type]


class KeepsBlocksOfTheEnded(Planted):
    """The blocks of an ended request are kept until the step that still writes to them is done."""

    def __init__(self, config: KernelConfig) -> None:
        super().__init__(config)
        self._kept: list[tuple[OpenStep, list[int]]] = []

    def _retire(self, sequence: Sequence, reason: str) -> Finished:
        writing = [record for record in self._open if record.has(sequence.request_id)]
        if writing:
            self._kept.append((writing[-1], sequence.block_table))
            sequence.block_table = []
        return super()._retire(sequence, reason)

    def _commit(self, record: OpenStep, token_ids: Seq[int], stopped: Seq[RequestId]):  # type: ignore[no-untyped-def, override]  # noqa: ANN202
        outcome = super()._commit(record, token_ids, stopped)  # type: ignore[arg-type]
        for step, table in self._kept:
            if step is record:
                self.state.manager.pool.release(table)
        self._kept = [pair for pair in self._kept if pair[0] is not record]
        return outcome


class ReportsVoidTokens(Planted):
    """The token of an entry whose request had ended is handed out."""

    def _retire(self, sequence: Sequence, reason: str) -> Finished:
        ended = super()._retire(sequence, reason)
        for record in self._open:
            record.dropped.discard(sequence.request_id)
        return ended


class ForgetsStaleTokens(Planted):
    """The token in flight of a preempted request is thrown away (our own defect of 2026-11)."""

    def _book_tokens(self, record: OpenStep, token_ids: Seq[int]) -> None:
        waiting = [(s, len(s.output_token_ids)) for s in self.state.waiting]
        super()._book_tokens(record, token_ids)
        for sequence, before in waiting:
            del sequence.output_token_ids[before:]


class _LateKeysStep(Step):
    __slots__ = ()

    def _cache_before_newest(self, state: KernelState, sequence: Sequence, num_tokens: int) -> None:
        pass


class KeysOnlyAtTheCommit(Planted):
    """A block filled by decoding gets its key with the commit and not before the admissions."""

    step_class = _LateKeysStep


class _SparesFinishedPolicyState(KernelState):
    def newest(self) -> Sequence:
        for sequence in reversed(self.running.values()):
            if (
                sequence.request_id in self.decodes.members
                or sequence.request_id in self.partial_prefills
            ):
                return sequence
        return super().newest()


class SparesThoseAtTheirLimit(Planted):
    """The victim is the newest that still has tokens to compute, and not simply the newest."""

    state_class = _SparesFinishedPolicyState


class SecondPlanKeepsItsKeys(Planted):
    """When a step fails, the keys of the step after it stay."""

    def discard(self, plan: StepPlan) -> tuple[Finished, ...]:
        """Forgets what the later plans registered."""
        for record in list(self._open)[1:]:
            record.cached.clear()
        return super().discard(plan)


class SecondPlanSparesItsRequests(Planted):
    """When a step fails, requests that only the step after it computes live on."""

    def discard(self, plan: StepPlan) -> tuple[Finished, ...]:
        """Drops the later plans without a word."""
        self._open = deque([self._open[0]])
        return super().discard(plan)


class ReusesVoidIds(Planted):
    """The id of an ended request can be used while a step in flight still computes for it."""

    def _ids_in_use(self, request_id: RequestId):  # type: ignore[no-untyped-def]  # noqa: ANN202
        return self.state.sequences


MUTANTS = (
    Mutant("A1", OverrunsKnownEnds, "own", is_async=True),
    Mutant("A2", KeepsBlocksOfTheEnded, "own", "mixed", is_async=True),
    Mutant("A2", ReportsVoidTokens, "own", is_async=True),
    Mutant("A3", ForgetsStaleTokens, "own", is_async=True),
    Mutant("T1", KeysOnlyAtTheCommit, "own", "mixed", is_async=True),
    Mutant("S10", SparesThoseAtTheirLimit, "own", "mixed", is_async=True),
    Mutant("A4", SecondPlanKeepsItsKeys, "own", "mixed", is_async=True),
    Mutant("A4", SecondPlanSparesItsRequests, "own", is_async=True),
    Mutant("C1", ReusesVoidIds, "own", is_async=True),
)
