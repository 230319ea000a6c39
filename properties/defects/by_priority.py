"""Defects of the policy `priority`."""

from __future__ import annotations

from engine.core.policies.priority import PriorityPolicy, PriorityQueue
from engine.core.sequence import Sequence
from engine.core.state import KernelState
from engine.core.step import Step
from engine.core.waiting import FcfsQueue, WaitingQueue
from properties.defects.planting import Mutant, Planted


class _ByArrivalPolicy(PriorityPolicy):
    def make_waiting(self) -> WaitingQueue:  # type: ignore[override]
        return FcfsQueue()


class WaitsByArrival(Planted):
    """Waiting requests are tried in order of arrival whatever their priority."""

    priority_class = _ByArrivalPolicy


class _VictimFirstQueue(PriorityQueue):
    def put_back(self, sequence: Sequence) -> None:
        self._ordered.insert(0, sequence)


class _VictimFirstPolicy(PriorityPolicy):
    def make_waiting(self) -> PriorityQueue:
        return _VictimFirstQueue()


class VictimGoesFirst(Planted):
    """A preempted request goes before everybody and not to its place."""

    priority_class = _VictimFirstPolicy


class _NewestVictimPolicy(PriorityPolicy):
    def serve(
        self, state: KernelState, step: Step, num_rows: int, chunks: list[tuple[Sequence, int]]
    ) -> None:
        super(PriorityPolicy, self).serve(state, step, num_rows, chunks)


class NewestGivesWay(Planted):
    """The newest running request gives way and not the least important."""

    priority_class = _NewestVictimPolicy


class _KeepsKeysPolicy(PriorityPolicy):
    def _withdraw(self, state: KernelState, step: Step, victim: Sequence, count: int) -> None:
        state.preempt(victim)
        step.forget_new_blocks(victim.request_id)


class KeepsWithdrawnKeys(Planted):
    """A withdrawn entry's keys stay, so that KV that nobody wrote can be hit (vLLM 0.33.0)."""

    priority_class = _KeepsKeysPolicy


MUTANTS = (
    Mutant("S14", WaitsByArrival, "own", "priority"),
    Mutant("S14", VictimGoesFirst, "own", "priority"),
    Mutant("S13", NewestGivesWay, "own", "priority"),
    Mutant(
        "V1",
        KeepsWithdrawnKeys,
        "vLLM 0.33.0, recording v030024",
        "priority",
        workloads="crowded_prompts",
    ),
)
