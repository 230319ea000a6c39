"""Schedulers that are broken outright: nothing that judges may call one of them right.

They are not subtle. A probe that swallows a crash, or compares nothing with nothing, is found by
them; see `properties/tests/test_broken.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from engine.core.config import KernelConfig
from engine.core.plan import NO_DECODES, DecodeRun, StepOutcome, StepPlan
from engine.core.request import RequestId
from engine.core.scheduler import Scheduler


class Raises(Scheduler):
    """Every step raises."""

    def schedule(self) -> StepPlan:
        raise RuntimeError("no step today")


class ReturnsNothing(Scheduler):
    """Every step is empty, and every commit changes nothing."""

    def schedule(self) -> StepPlan:
        return _empty(self)

    def commit(
        self, plan: StepPlan, token_ids: Sequence[int], stopped: Collection[RequestId] = ()
    ) -> StepOutcome:
        return StepOutcome(plan.step, (), (), ())


class NeverFinishes(Scheduler):
    """Does everything right, tells nobody when a request ends, and has work for ever."""

    def __init__(self, config: KernelConfig) -> None:
        super().__init__(config)
        self._began = False

    @property
    def has_work(self) -> bool:
        return self._began or super().has_work

    def schedule(self) -> StepPlan:
        self._began = True
        return super().schedule() if super().has_work else _empty(self)

    def commit(
        self, plan: StepPlan, token_ids: Sequence[int], stopped: Collection[RequestId] = ()
    ) -> StepOutcome:
        if not plan.num_entries:
            return StepOutcome(plan.step, (), (), ())
        return replace(super().commit(plan, token_ids, stopped), finished=())

    def run_decode(
        self, plan: StepPlan, num_steps: int, tokens: Callable[[int], Sequence[int]]
    ) -> DecodeRun:
        run = super().run_decode(plan, num_steps, tokens)
        return replace(run, outcome=replace(run.outcome, finished=()))


def _empty(scheduler: Scheduler) -> StepPlan:
    """A step without entries."""
    return StepPlan(
        step=0,
        clock=0,
        decode=NO_DECODES,
        chunks=(),
        new_blocks=(),
        admitted=(),
        preempted=(),
        num_tokens=0,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_free_blocks=scheduler.num_free_blocks,
    )


BROKEN: tuple[type[Scheduler], ...] = (Raises, ReturnsNothing, NeverFinishes)
