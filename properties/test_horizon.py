"""`decode_horizon` is exact where a run can be foreseen, and 1 where it cannot."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.config import KernelConfig
from engine.core.request import Request
from engine.core.scheduler import Scheduler
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


@pytest.mark.parametrize(("policy", "length"), [("mixed", 2), ("prefill_first", 3)])
def test_horizon_is_one_while_a_decode_may_fill_the_block_that_the_head_lacks(
    policy: str, length: int
) -> None:
    """The head fits as soon as request 0 has computed token 4 of the prefix that they share."""
    scheduler = _started(policy, 4, length, num_blocks=3)
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
