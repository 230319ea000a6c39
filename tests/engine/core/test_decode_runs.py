"""How far a run of decode steps can be foreseen, around arrivals, stops and ends."""

import pytest

from engine.core import KernelConfig, Prompt, Request, Scheduler, audit

POLICIES = ("mixed", "prefill_first")


def make(policy, **options):
    sizes = {"num_blocks": 16, "max_model_len": 64, "block_size": 2, "max_num_batched_tokens": 32}
    return Scheduler(KernelConfig(policy=policy, **{**sizes, **options}))


def step(scheduler, token=70):
    plan = scheduler.schedule()
    return scheduler.commit(plan, [token] * len(plan.sampled_ids))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("end", ["stop", "length", "abort"])
def test_the_horizon_is_whole_again_once_nobody_can_stop_any_more(policy, end):
    scheduler = make(policy)
    scheduler.add(Request(0, Prompt([1, 2]), 12))
    scheduler.add(Request(1, Prompt([3, 4]), 3, frozenset({7})))
    step(scheduler)
    plan = scheduler.schedule()
    assert scheduler.decode_horizon(plan) == 1
    scheduler.commit(plan, [70, 70])
    if end == "abort":
        scheduler.abort(1)
    else:
        assert [e.reason for e in step(scheduler, 7 if end == "stop" else 70).finished] == [end]
    left = 12 - len(scheduler.output_token_ids(0))
    assert scheduler.decode_horizon(scheduler.schedule()) == left


@pytest.mark.parametrize("policy", POLICIES)
def test_the_horizon_of_an_empty_step_is_that_step(policy):
    """Without the check at the door a request may wait for ever for blocks that do not exist."""
    scheduler = make(policy, num_blocks=1, reject_impossible=False)
    scheduler.add(Request(0, Prompt(range(5)), 3))
    plan = scheduler.schedule()
    assert plan.num_entries == 0
    assert scheduler.decode_horizon(plan) == 1
    run = scheduler.run_decode(plan, 1, lambda row: [])
    assert (run.num_steps, len(run.decode)) == (1, 0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
def test_blocks_that_fill_up_in_a_run_can_be_hit_from_then_on(policy, block_size):
    """Wherever the run ends, whatever part of it needed a block."""
    for done in range(1, 25):
        scheduler = make(policy, block_size=block_size, num_blocks=64, max_model_len=64)
        scheduler.add(Request(0, Prompt([1, 2, 3]), 40))
        step(scheduler, 50)
        scheduler.run_decode(scheduler.schedule(), done, lambda row, n=done: range(200, 200 + n))
        audit(scheduler)
        tokens = [1, 2, 3, 50, *range(200, 200 + done)]
        computed = len(tokens) - 1  # the newest token has no KV yet
        scheduler.add(Request(1, Prompt([*tokens, 9]), 1))
        (admission,) = scheduler.schedule().admitted
        if policy == "mixed":
            computed += 1  # the step that admits serves request 0 first, and keys that block too
        assert admission.hit_tokens == computed // block_size * block_size
