"""`decode_horizon` is exact where a run can be foreseen, and 1 where it cannot."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.config import KernelConfig
from engine.core.plan import StepPlan
from engine.core.request import Request
from engine.core.scheduler import Scheduler, StepOrderError
from engine.core.tokens import Prompt

POLICIES = ("mixed", "prefill_first")


def _scheduler(policy: str, **options: Any) -> Scheduler:  # noqa: ANN401
    sizes = {"num_blocks": 16, "max_model_len": 64, "block_size": 2, "max_num_batched_tokens": 32}
    return Scheduler(KernelConfig(policy=policy, **{**sizes, **options}))


def _horizon(scheduler: Scheduler) -> int:
    return scheduler.decode_horizon(scheduler.schedule())


def _started(policy: str, outputs: int, length: int = 2, **options: Any) -> Scheduler:  # noqa: ANN401
    """A scheduler whose only request has its first token."""
    scheduler = _scheduler(policy, **options)
    scheduler.add(Request(0, Prompt(range(length)), outputs))
    scheduler.commit(scheduler.schedule(), [50])
    return scheduler


@pytest.mark.parametrize("policy", POLICIES)
def test_horizon_of_a_lone_request_is_all_that_it_has_left(policy: str) -> None:
    assert _horizon(_started(policy, 9)) == 8


@pytest.mark.parametrize("policy", POLICIES)
def test_horizon_ends_with_the_first_request_that_ends(policy: str) -> None:
    scheduler = _scheduler(policy)
    scheduler.add(Request(0, Prompt([1, 2]), 9))
    scheduler.add(Request(1, Prompt([3, 4]), 5))
    scheduler.commit(scheduler.schedule(), [50, 60])
    assert _horizon(scheduler) == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_horizon_is_one_where_a_token_may_stop_a_request(policy: str) -> None:
    scheduler = _scheduler(policy)
    scheduler.add(Request(0, Prompt([1, 2]), 9, frozenset({7})))
    scheduler.commit(scheduler.schedule(), [50])
    assert _horizon(scheduler) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_waiting_without_a_seat_does_not_shorten_the_horizon(policy: str) -> None:
    scheduler = _started(policy, 9, max_num_seqs=1)
    scheduler.add(Request(1, Prompt([3]), 1))
    assert _horizon(scheduler) == 8


@pytest.mark.parametrize("policy", POLICIES)
def test_waiting_for_blocks_does_not_shorten_the_horizon(policy: str) -> None:
    for caching in (True, False):
        scheduler = _started(policy, 9, num_blocks=6, enable_prefix_caching=caching)
        scheduler.add(Request(1, Prompt(range(30, 41)), 1))
        assert _horizon(scheduler) == 8


def test_waiting_for_budget_does_not_shorten_the_horizon() -> None:
    scheduler = _scheduler("mixed", max_num_batched_tokens=2)
    scheduler.add(Request(0, Prompt([1, 2]), 9))
    scheduler.commit(scheduler.schedule(), [50])
    scheduler.add(Request(1, Prompt([3]), 9))
    scheduler.commit(scheduler.schedule(), [51, 60])
    scheduler.add(Request(2, Prompt([4]), 1))
    assert _horizon(scheduler) == 7


@pytest.mark.parametrize("budget", [2, 32])
@pytest.mark.parametrize(("policy", "length"), [("mixed", 2), ("prefill_first", 3)])
def test_horizon_is_one_while_a_decode_may_fill_the_block_that_the_head_lacks(
    policy: str, length: int, budget: int
) -> None:
    """The head fits as soon as request 0 has computed token 4 of the prefix that they share."""
    if policy == "prefill_first":
        budget = 32
    scheduler = _started(policy, 4, length, num_blocks=3, max_num_batched_tokens=budget)
    shared = [*range(length), 50, 51][:4]
    scheduler.add(Request(1, Prompt([*shared, 9]), 1))
    plan = scheduler.schedule()
    assert not plan.admitted
    assert scheduler.decode_horizon(plan) == 1
    scheduler.commit(plan, [51])
    plans = []
    while scheduler.has_work:
        plans.append(scheduler.schedule())
        scheduler.commit(plans[-1], [52] * len(plans[-1].sampled_ids))
    hits = [admission.hit_tokens for plan in plans for admission in plan.admitted]
    assert hits == [4]


@pytest.mark.parametrize("policy", POLICIES)
def test_horizon_ends_before_blocks_run_out(policy: str) -> None:
    scheduler = _scheduler(policy, num_blocks=6, max_model_len=12)
    scheduler.add(Request(0, Prompt([1, 2]), 9))
    scheduler.add(Request(1, Prompt([3, 4]), 9))
    scheduler.commit(scheduler.schedule(), [50, 60])
    # Tokens 3 and 5 need a second and a third block each: token 7 would need the seventh.
    assert _horizon(scheduler) == 4


def _brute_force(scheduler: Scheduler, plan: StepPlan) -> int:
    """Counts the steps from `plan` on that decode the same rows, up to the first that ends one."""
    steps = 0
    opened = plan
    while not opened.chunks and not opened.preempted:
        if opened.decode.request_ids != plan.decode.request_ids:
            break
        steps += 1
        outcome = scheduler.commit(opened, [77] * len(opened.sampled_ids))
        if outcome.finished or not scheduler.has_work:
            break
        opened = scheduler.schedule()
    return steps


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num_blocks", [4, 5, 6, 8, 13])
def test_horizon_is_exact_while_nobody_waits(policy: str, block_size: int, num_blocks: int) -> None:
    for first in range(1, 6):
        for second in (1, 2, 3):
            outputs = num_blocks * block_size - max(first, second) + 1
            if outputs < 2:
                continue
            sizes = {"block_size": block_size, "num_blocks": num_blocks}
            scheduler = _scheduler(policy, **sizes, enable_prefix_caching=False)
            scheduler.add(Request(0, Prompt(range(first)), outputs))
            scheduler.add(Request(1, Prompt(range(50, 50 + second)), outputs))
            plan = scheduler.schedule()
            scheduler.commit(plan, [70] * len(plan.sampled_ids))
            plan = scheduler.schedule()
            if plan.chunks or plan.preempted:
                continue
            horizon = scheduler.decode_horizon(plan)
            assert horizon == _brute_force(scheduler, plan), (first, second)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("blocks_left", [2, 5])
def test_horizon_is_one_once_an_arrival_fits(policy: str, blocks_left: int) -> None:
    """The arrival comes while the step runs; it needs two blocks, and exactly two may be free."""
    scheduler = _started(policy, 3, num_blocks=2 + blocks_left)
    plan = scheduler.schedule()
    assert scheduler.num_free_blocks == blocks_left
    scheduler.add(Request(1, Prompt([8, 9, 10, 11]), 1))
    assert scheduler.decode_horizon(plan) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_horizon_is_one_for_prompts(policy: str) -> None:
    scheduler = _scheduler(policy)
    scheduler.add(Request(0, Prompt([1, 2]), 9))
    plan = scheduler.schedule()
    assert scheduler.decode_horizon(plan) == 1
    with pytest.raises(StepOrderError, match="cannot take 1 steps from 0"):
        scheduler.run_decode(plan, 1, lambda row: [5])


@pytest.mark.parametrize("policy", POLICIES)
def test_horizon_is_one_while_an_abort_waits(policy: str) -> None:
    scheduler = _started(policy, 9)
    plan = scheduler.schedule()
    scheduler.abort(0)
    assert scheduler.decode_horizon(plan) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_horizon_is_one_in_a_step_that_preempts(policy: str) -> None:
    scheduler = _scheduler(policy, num_blocks=3)
    scheduler.add(Request(0, Prompt([1, 2]), 5))
    scheduler.add(Request(1, Prompt([3]), 4))
    plan = scheduler.schedule()
    scheduler.commit(plan, [50, 60])
    while not plan.preempted:
        plan = scheduler.schedule()
        if not plan.preempted:
            scheduler.commit(plan, [51] * len(plan.sampled_ids))
    assert scheduler.decode_horizon(plan) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_horizon_is_one_with_a_second_open_plan(policy: str) -> None:
    scheduler = _started(policy, 9, async_scheduling=True)
    plan = scheduler.schedule()
    assert scheduler.decode_horizon(plan) == 8
    scheduler.schedule()
    assert scheduler.decode_horizon(plan) == 1


def test_horizon_is_one_where_the_budget_leaves_somebody_out() -> None:
    scheduler = _scheduler("prefill_first", max_num_batched_tokens=1)
    for name in (0, 1):
        scheduler.add(Request(name, Prompt([name]), 9))
        scheduler.commit(scheduler.schedule(), [50])
    plan = scheduler.schedule()
    assert len(plan.decode) == 1
    assert scheduler.decode_horizon(plan) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_run_decode_refuses_what_is_not_certain(policy: str) -> None:
    scheduler = _scheduler(policy)
    scheduler.add(Request(0, Prompt([1, 2]), 9, frozenset({7})))
    scheduler.commit(scheduler.schedule(), [50])
    plan = scheduler.schedule()
    for steps in (0, -1, 2):
        with pytest.raises(StepOrderError, match=f"cannot take {steps} steps from 1"):
            scheduler.run_decode(plan, steps, lambda row: [5, 5])
    run = scheduler.run_decode(plan, 1, lambda row: [7])
    assert [ended.reason for ended in run.outcome.finished] == ["stop"]


@pytest.mark.parametrize("policy", POLICIES)
def test_run_decode_tells_what_it_did(policy: str) -> None:
    scheduler = _started(policy, 9)
    plan = scheduler.schedule()
    run = scheduler.run_decode(plan, 3, lambda row: [5, 6, 7])
    assert (run.first_step, run.num_steps, run.outcome.step) == (1, 3, 3)
    assert run.decode is plan.decode
    assert list(scheduler.output_token_ids(0)) == [50, 5, 6, 7]
    assert scheduler.num_tokens(0) == 6
    assert scheduler.num_computed_tokens(0) == 5
    following = scheduler.schedule()
    assert following.step == 4
    scheduler.commit(following, [8])
    assert scheduler.num_tokens(0) == 7
    assert scheduler.schedule().step == 5


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_are_numbered_across_uneventful_runs(policy: str) -> None:
    """With blocks of 16 most steps of a run need no block, and are passed over."""
    scheduler = _started(policy, 40, block_size=16)
    done = 1
    for length in (1, 2, 3, 9, 11):
        plan = scheduler.schedule()
        assert plan.step == done
        scheduler.run_decode(plan, length, lambda row: range(60, 80))
        done += length
        assert scheduler.num_tokens(0) == 2 + done
    assert scheduler.schedule().step == done


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_counted_before_anybody_asks_for_them(policy: str) -> None:
    scheduler = _started(policy, 9)
    for known in (4, 5, 6):
        scheduler.commit(scheduler.schedule(), [60])
        assert scheduler.num_tokens(0) == known


@pytest.mark.parametrize("policy", POLICIES)
def test_views_count_what_there_is(policy: str) -> None:
    scheduler = _started(policy, 9, max_num_seqs=1)
    scheduler.add(Request(1, Prompt([3, 4, 5]), 2))
    assert (scheduler.num_waiting, scheduler.num_running) == (1, 1)
    assert (scheduler.num_tokens(0), scheduler.num_tokens(1)) == (3, 3)
    assert not scheduler.open_plans
    plan = scheduler.schedule()
    assert list(scheduler.open_plans) == [plan]
    assert scheduler.num_free_blocks == 14
    assert (plan.num_waiting, plan.num_running, plan.num_free_blocks) == (1, 1, 14)


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_of_a_request_that_ended_while_a_step_was_open_are_free_once(policy: str) -> None:
    scheduler = _scheduler(policy, async_scheduling=True)
    scheduler.add(Request(0, Prompt([1, 2]), 9, frozenset({7})))
    scheduler.commit(scheduler.schedule(), [50])
    first, second = scheduler.schedule(), scheduler.schedule()
    (ended,) = scheduler.commit(first, [7]).finished
    assert ended.reason == "stop"
    assert scheduler.num_free_blocks == 16  # LAW-A2
    assert scheduler.discard(second) == ()
    assert scheduler.num_free_blocks == 16
