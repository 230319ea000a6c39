"""`run_decode` against the steps that it stands for."""

from __future__ import annotations

import pickle
from typing import Any, Protocol

from engine.core.plan import DecodeRun, NewBlocks, StepOutcome, StepPlan
from engine.core.scheduler import Scheduler
from properties.follower import Follower
from properties.follower.view import PlanView, Target


class Stepper(Protocol):
    """A run that goes on step by step: what `run_ahead` needs of a driver."""

    target: Target
    follower: Follower

    def open(self) -> PlanView | None: ...  # noqa: D102
    def close(self) -> tuple[list[int], StepOutcome | None]: ...  # noqa: D102


def clone(scheduler: Scheduler) -> Scheduler:
    """An independent copy of a scheduler without open plans; several times faster than deepcopy."""
    copied = pickle.loads(pickle.dumps(scheduler, protocol=5))
    assert isinstance(copied, Scheduler)
    return copied


def run_ahead(driver: Stepper, want: int) -> None:
    """Does a stretch of decode steps one by one and, on a copy, in one go; both must agree.

    The run goes on with the copy. `want` chooses how much of the horizon is used.
    """
    one_by_one = driver.target
    assert isinstance(one_by_one, Scheduler)
    at_once = clone(one_by_one)
    plan = at_once.schedule()
    if plan.chunks or not plan.num_entries:
        return
    num_steps = 1 + want % at_once.decode_horizon(plan)
    complain = driver.follower.complain
    columns: list[list[int]] = []
    blocks: list[tuple[int, NewBlocks]] = []
    outcome: StepOutcome | None = None
    for offset in range(num_steps):
        opened = driver.open()
        assert isinstance(opened, StepPlan)
        if opened.chunks or opened.decode.request_ids != plan.decode.request_ids:
            complain("RUN", f"step {offset} of {num_steps} is not the same decode")
        if opened.preempted != (plan.preempted if not offset else ()) or opened.admitted:
            complain("RUN", f"step {offset} of {num_steps} preempts or admits")
        blocks.extend((offset, new) for new in opened.new_blocks)
        num_free = opened.num_free_blocks
        tokens, outcome = driver.close()
        columns.append(tokens)
        if outcome is not None and outcome.finished and offset + 1 < num_steps:
            complain("RUN", f"step {offset} of {num_steps} finishes requests")
    run = at_once.run_decode(plan, num_steps, lambda row: [column[row] for column in columns])
    assert outcome is not None
    _compare_runs(driver, run, (plan.step, num_steps, blocks, num_free), outcome)
    _compare_states(driver, one_by_one, at_once)
    driver.target = at_once
    driver.follower.check_state(at_once)


def _compare_runs(
    driver: Stepper, run: DecodeRun, expected: tuple[int, int, Any, int], outcome: StepOutcome
) -> None:
    told = (run.first_step, run.num_steps, list(run.new_blocks), run.num_free_blocks)
    if told != expected or run.decode.request_ids != tuple(run.outcome.sampled):
        driver.follower.complain("RUN", f"run {told}, step by step {expected}")
    for ended in (run.outcome, outcome):
        assert len(ended.sampled) == len(ended.token_ids)
    one, other = (
        (
            o.step,
            list(o.sampled),
            list(o.token_ids),
            [(f.request_id, f.reason, list(f.output_token_ids)) for f in o.finished],
        )
        for o in (run.outcome, outcome)
    )
    if one != other:
        driver.follower.complain("RUN", f"run ends with {one}, step by step with {other}")


def _compare_states(driver: Stepper, one_by_one: Scheduler, at_once: Scheduler) -> None:
    one, other = (
        (
            s.waiting_ids(),
            s.running_ids(),
            s.free_order(),
            [
                (s.block_table(name), s.num_computed_tokens(name), list(s.output_token_ids(name)))
                for name in s.waiting_ids() + s.running_ids()
            ],
        )
        for s in (at_once, one_by_one)
    )
    if one != other:
        driver.follower.complain("RUN", f"state {one} after the run, {other} step by step")
