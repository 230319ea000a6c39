"""Keys and known tokens in steps that random workloads seldom meet, looked at without an audit.

An audit hands every token of a batch to its sequence, and with that hides who forgot to.
"""

from engine.core import KernelConfig, Prompt, Request, Scheduler


def make(num_blocks=16, **options):
    sizes = {"max_model_len": 64, "block_size": 2, "max_num_batched_tokens": 32}
    return Scheduler(KernelConfig(num_blocks=num_blocks, **{**sizes, **options}))


def request(name, tokens, max_tokens=4, **options):
    return Request(name, Prompt(tokens), max_tokens, **options)


def commit(scheduler, plan, token=70):
    return scheduler.commit(plan, [token] * len(plan.sampled_ids))


def hits_of(plan):
    return {admission.request_id: admission.hit_tokens for admission in plan.admitted}


def test_known_tokens_count_those_that_nobody_has_asked_for_yet():
    scheduler = make()
    scheduler.add(request(1, [5, 6, 7]))
    for known in (4, 5, 6):
        commit(scheduler, scheduler.schedule())
        assert scheduler.num_known_tokens(1) == known


def test_a_prompt_of_one_block_too_many_waits_although_nobody_runs():
    scheduler = make(4, reject_impossible=False, watermark_blocks=1)
    scheduler.add(request(1, range(9), 1))
    for _ in range(2):
        plan = scheduler.schedule()
        assert plan.num_entries == 0 and scheduler.num_free_blocks == 4
        commit(scheduler, plan)


def test_a_key_is_due_at_once_while_blocks_are_short():
    """The tokens of the block are still with the batch when it fills."""
    scheduler = make(3, policy="priority")
    scheduler.add(request(1, [1, 2], 3, priority=0))
    scheduler.add(request(2, [9], 4, priority=1))
    for token in (71, 72):
        commit(scheduler, scheduler.schedule(), token)
    plan = scheduler.schedule()
    assert plan.preempted == (2,)
    commit(scheduler, plan, 73)
    scheduler.abort(2)
    scheduler.add(request(3, [1, 2, 71, 72, 5], 1))
    assert hits_of(scheduler.schedule()) == {3: 4}


def test_a_decode_that_the_open_plan_left_out_gets_its_key_at_once():
    """All its tokens are known, so a request of the same step finds the block that it fills."""
    scheduler = make(
        16, prefill_schedule_interval=2, long_prefill_token_threshold=2,
        max_num_batched_tokens=3, async_scheduling=True,
    )  # fmt: skip
    scheduler.add(request(1, range(10, 20), 1))
    scheduler.add(request(2, [30], 9))
    first = scheduler.schedule()
    scheduler.add(request(3, [40], 9))
    second = scheduler.schedule()
    assert [tuple(entry)[:3] for entry in second.entries] == [(2, 1, 1), (3, 0, 1)]
    commit(scheduler, first)
    third = scheduler.schedule()
    assert [tuple(entry)[:3] for entry in third.entries] == [(1, 2, 2), (2, 2, 1)]
    commit(scheduler, second)
    scheduler.add(request(4, [40, 70, 8], 1))
    fourth = scheduler.schedule()
    assert [tuple(entry)[:3] for entry in fourth.entries] == [(2, 3, 1), (3, 1, 1), (4, 2, 1)]


def test_a_key_behind_an_open_plan_of_chunks_needs_the_tokens_of_the_batch_before():
    """The open plan has no decodes, so the batch before it still keeps its rows' newest tokens."""
    scheduler = make(
        16, block_size=3, prefill_schedule_interval=3, max_num_batched_tokens=3,
        async_scheduling=True,
    )  # fmt: skip
    scheduler.add(request(1, [5], 3))
    scheduler.add(request(2, range(10, 20), 1))
    plans = [scheduler.schedule()]
    scheduler.add(request(3, [30], 9))
    for _ in range(3):
        plans.append(scheduler.schedule())
        commit(scheduler, plans[-2])
    assert not plans[-1].decode and [tuple(entry)[:3] for entry in plans[-1].entries] == [(2, 2, 3)]
    scheduler.add(request(4, [30, 70, 70, 8], 1))
    plan = scheduler.schedule()
    assert [tuple(entry)[:3] for entry in plan.entries] == [(3, 2, 1), (4, 3, 1)]


def test_a_block_that_fills_in_a_withdrawn_entry_is_freed_like_one_with_a_key():
    """`priority`: behind the block of the first victim, as in vLLM, and not before it."""
    scheduler = make(
        10, policy="priority", long_prefill_token_threshold=4, reserve_full_prompt=False
    )
    scheduler.add(request(1, [1, 2], 9, priority=5))
    commit(scheduler, scheduler.schedule())
    scheduler.add(request(2, range(10, 28), 1, priority=0))
    for _ in range(2):
        commit(scheduler, scheduler.schedule())
    scheduler.add(request(3, [50, 51], 9, priority=9))
    plan = scheduler.schedule()
    commit(scheduler, plan)
    blocks = {new.request_id: new.block_ids for new in plan.new_blocks}
    plan = scheduler.schedule()
    assert plan.preempted == (3, 1)  # the second had been served: its third block fills now
    assert [new.block_ids for new in plan.new_blocks] == [blocks[3] + blocks[1]]


def test_an_empty_step_is_not_counted_between_prefills():
    """P-R4 counts steps with tokens: the one in which the only decode gave way is none."""
    scheduler = make(
        2, prefill_schedule_interval=3, long_prefill_token_threshold=2, reserve_full_prompt=False,
    )  # fmt: skip
    scheduler.add(request(1, [10, 11, 12], 2))
    scheduler.add(request(2, [20, 21], 3))
    commit(scheduler, scheduler.schedule())  # prefill: from here on it is counted
    plan = scheduler.schedule()
    assert plan.num_entries == 0 and plan.preempted == (2,)
    commit(scheduler, plan)
    scheduler.abort(1)
    scheduler.abort(2)
    scheduler.add(request(3, [30], 3))
    plan = scheduler.schedule()
    assert plan.num_tokens == 1
    commit(scheduler, plan)
    scheduler.add(request(4, [40, 41], 1))
    plan = scheduler.schedule()  # a block is free, but this is only the second step of three
    assert (scheduler.num_waiting, scheduler.num_free_blocks) == (1, 1)
    assert [entry.request_id for entry in plan.entries] == [3]
