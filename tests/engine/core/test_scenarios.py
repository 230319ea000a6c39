"""What went wrong in real systems, as small scenarios on the kernel (ids of docs/bugs.md)."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core import (
    KernelConfig,
    Prompt,
    Request,
    RequestRejected,
    Scheduler,
    StepOrderError,
    StepPlan,
    audit,
)

POLICIES = ("mixed", "prefill_first")


def make(policy: str = "mixed", **options: Any) -> Scheduler:
    sizes = {"num_blocks": 8, "block_size": 4, "max_model_len": 64, "max_num_batched_tokens": 64}
    return Scheduler(KernelConfig(policy=policy, **{**sizes, **options}))


def add(scheduler: Scheduler, name: int, prompt: list[int] | range, outputs: int, **more: Any):
    scheduler.add(Request(name, Prompt(prompt), outputs, **more))


def step(scheduler: Scheduler, token: int = 500) -> StepPlan:
    """One step in which every sample is `token` + the request's id."""
    plan = scheduler.schedule()
    scheduler.commit(plan, [token + int(name) for name in plan.sampled_ids])
    audit(scheduler)
    return plan


def drain(scheduler: Scheduler, limit: int = 500) -> list[StepPlan]:
    plans = []
    while scheduler.has_work:
        plans.append(step(scheduler))
        assert len(plans) < limit, "PROG: it does not end"
    assert scheduler.num_free_blocks == scheduler.config.num_blocks
    return plans


def batch(plan: StepPlan) -> list[tuple[object, int, int]]:
    return [(entry.request_id, entry.first_position, entry.num_tokens) for entry in plan.entries]


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_b01_c27_request_larger_than_the_pool_is_rejected_and_others_are_served(policy):
    scheduler = make(policy)
    with pytest.raises(RequestRejected) as refused:
        add(scheduler, 0, range(40), 1)
    assert refused.value.reason == "pool_too_small"
    add(scheduler, 1, range(4), 4)
    assert drain(scheduler)


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_b02_request_that_would_outgrow_the_pool_is_rejected_a_fitting_one_completes(
    policy,
):
    scheduler = make(policy, num_blocks=2)
    with pytest.raises(RequestRejected):
        add(scheduler, 0, range(8), 2)
    add(scheduler, 1, range(8), 1)  # its only output is never written
    drain(scheduler)


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_b03_c11_no_more_requests_hold_blocks_than_there_are_seats(policy):
    scheduler = make(policy, max_num_seqs=2, max_num_batched_tokens=4, num_blocks=40)
    for name in range(6):
        add(scheduler, name, [name, name], 5)
    while scheduler.has_work:
        step(scheduler)
        names = scheduler.running_ids() + scheduler.waiting_ids()
        assert sum(1 for name in names if scheduler.block_table(name)) <= 2


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_b04_decode_steps_keep_within_the_token_budget(policy):
    scheduler = make(policy, max_num_seqs=50, max_num_batched_tokens=4, num_blocks=40)
    for name in range(8):
        add(scheduler, name, [name, name], 5)
    assert all(plan.num_tokens <= 4 for plan in drain(scheduler))


def test_bug_b05_b06_mixed_decodes_in_every_step_while_prompts_arrive():
    scheduler = make(max_num_batched_tokens=4, num_blocks=400)
    add(scheduler, 0, [1], 60)
    step(scheduler)
    for name in range(1, 51):
        add(scheduler, name, range(100 * name, 100 * name + 4), 1)
        assert batch(step(scheduler))[0][0] == 0


def test_bug_b05_prefill_first_lets_arrivals_go_first():
    scheduler = make("prefill_first", max_num_batched_tokens=4, num_blocks=400)
    add(scheduler, 0, [1], 60)
    step(scheduler)
    for name in range(1, 11):
        add(scheduler, name, range(100 * name, 100 * name + 4), 1)
        assert [entry[0] for entry in batch(step(scheduler))] == [name]


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_b08_preemptions_of_the_ping_pong_case_are_bounded(policy):
    scheduler = make(policy, num_blocks=10, max_num_seqs=50)
    for name, (prompt, outputs) in enumerate([(1, 7), (10, 5), (3, 13), (2, 24), (2, 16), (3, 21)]):
        add(scheduler, name, range(100 * name, 100 * name + prompt), outputs)
    preempted = [name for plan in drain(scheduler) for name in plan.preempted]
    assert len(preempted) <= 10  # nano-vLLM: 5 + 2 of the last two alone
    assert 0 not in preempted


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_b09_losing_one_copy_keeps_the_other_findable(policy):
    scheduler = make(policy, num_blocks=4)
    add(scheduler, 0, [1, 2, 3, 4, 5], 4)
    add(scheduler, 1, [1, 2, 3, 4, 6], 1)
    step(scheduler)
    step(scheduler)
    add(scheduler, 2, [1, 2, 3, 4, 9], 1)
    admitted = [a for plan in drain(scheduler) for a in plan.admitted]
    assert [a.hit_tokens for a in admitted if a.request_id == 2] == [4]


@pytest.mark.parametrize(("policy", "computed"), [("mixed", 108), ("prefill_first", 808)])
def test_bug_b10_shared_prefix_in_one_step(policy, computed):
    scheduler = make(
        policy, num_blocks=300, max_model_len=200, max_num_batched_tokens=2000, max_num_seqs=50
    )
    for name in range(8):
        add(scheduler, name, [*range(100), 1000 + name], 1)
    assert step(scheduler).num_tokens == computed


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_b11_c01_fully_cached_prompt_computes_its_last_block_and_emits_one_token(policy):
    scheduler = make(policy)
    add(scheduler, 0, range(8), 1)
    drain(scheduler)
    add(scheduler, 1, range(8), 1)
    plan = step(scheduler)
    assert batch(plan) == [(1, 4, 4)]
    assert list(plan.sampled_ids) == [1]


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_b12_head_of_line_blocks_and_nobody_overtakes(policy):
    scheduler = make(policy, num_blocks=4)
    add(scheduler, 0, range(4), 10)
    step(scheduler)
    add(scheduler, 1, range(100, 112), 1)
    add(scheduler, 2, [7], 1)
    order = [a.request_id for plan in drain(scheduler) for a in plan.admitted]
    assert order == [1, 2]


@pytest.mark.parametrize(
    ("policy", "tokens"), [("mixed", [100, 100, 20]), ("prefill_first", [60, 50, 60, 50])]
)
def test_bug_b13_budget_fragmentation(policy, tokens):
    scheduler = make(policy, num_blocks=100, max_model_len=200, max_num_batched_tokens=100)
    for name, length in enumerate((60, 50, 60, 50)):
        add(scheduler, name, range(1000 * name, 1000 * name + length), 1)
    assert [plan.num_tokens for plan in drain(scheduler)] == tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_b17_c38_colliding_hashes_never_share_blocks(policy):
    scheduler = make(policy, num_blocks=16, hash_bits=1)
    add(scheduler, 0, [1, 2, 3, 4, 5, 5, 5, 5, 9], 1)
    drain(scheduler)
    add(scheduler, 1, [4, 3, 2, 1, 5, 5, 5, 5, 9], 1)
    assert step(scheduler).admitted[0].hit_tokens == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 16, 256])
def test_bug_b18_c45_any_block_size_works(policy, block_size):
    scheduler = make(policy, block_size=block_size, num_blocks=2048 // block_size)
    for name in range(3):
        add(scheduler, name, range(5 + name), 7)
    drain(scheduler)


@pytest.mark.parametrize("outputs", [0, -1])
def test_bug_b19_c10_a_request_without_outputs_is_rejected(outputs):
    scheduler = make()
    with pytest.raises(RequestRejected, match="max_tokens"):
        add(scheduler, 0, range(3), outputs)
    assert not scheduler.has_work


def test_bug_b20_c10_an_empty_prompt_is_rejected_before_any_change():
    scheduler = make()
    add(scheduler, 0, [1, 2], 1)
    with pytest.raises(RequestRejected, match="prompt_empty"):
        add(scheduler, 1, [], 1)
    assert scheduler.waiting_ids() == [0]


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_b21_c09_c32_output_stops_at_max_model_len(policy):
    scheduler = make(policy, max_model_len=16)
    add(scheduler, 0, range(15), 50)
    plan = scheduler.schedule()
    (ended,) = scheduler.commit(plan, [3]).finished
    assert (ended.reason, list(ended.output_token_ids)) == ("length", [3])
    with pytest.raises(RequestRejected, match="prompt_too_long"):
        add(scheduler, 1, range(16), 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_b22_c48_every_one_of_several_eos_ids_stops_after_min_tokens(policy):
    for eos in (7, 8):
        scheduler = make(policy)
        add(scheduler, 0, [1, 2], 9, stop_token_ids=frozenset({7, 8}), min_tokens=3)
        outputs: list[int] = []
        while scheduler.has_work:
            plan = scheduler.schedule()
            outcome = scheduler.commit(plan, [eos])
            outputs.append(eos)
            if outcome.finished:
                assert outcome.finished[0].reason == "stop"
        assert len(outputs) == 4


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("when", ["waiting", "mid-prompt", "decoding", "open"])
def test_bug_b41_abort_in_every_state_frees_blocks_once(policy, when):
    scheduler = make(policy, max_num_batched_tokens=4)
    add(scheduler, 0, range(10), 5)
    for _ in range({"waiting": 0, "mid-prompt": 1, "decoding": 4, "open": 1}[when]):
        step(scheduler)
    if when == "open":
        plan = scheduler.schedule()
        assert scheduler.abort(0) is None
        (ended,) = scheduler.commit(plan, [1] * len(plan.sampled_ids)).finished
    else:
        ended = scheduler.abort(0)
    assert ended.reason == "abort"
    assert not scheduler.has_work
    assert scheduler.num_free_blocks == 8
    audit(scheduler)


def test_bug_b42_prefill_first_takes_all_blocks_at_the_first_chunk_and_mixed_does_not():
    free = {}
    for policy in POLICIES:
        scheduler = make(policy, num_blocks=3, max_num_batched_tokens=6)
        add(scheduler, 0, range(11), 2)
        free[policy] = step(scheduler).num_free_blocks
    assert free == {"mixed": 1, "prefill_first": 0}


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_b44_equal_tokens_behind_another_prefix_are_no_hit(policy):
    scheduler = make(policy, block_size=2, num_blocks=4)
    hits = []
    for name, prompt in enumerate(([1, 2, 3, 4, 9], [5, 6, 7, 8, 3, 4], [1, 2, 3, 4, 9])):
        add(scheduler, name, prompt, 1)
        hits.append(step(scheduler).admitted[0].hit_tokens)
    assert hits[:2] == [0, 0]
    assert hits[2] in (0, 2)  # never position 2 and 3, whose block was computed after 7, 8


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_b45_c03_a_resumed_request_emits_exactly_one_token(policy):
    scheduler = make(policy, num_blocks=3)
    add(scheduler, 0, range(7), 3)
    add(scheduler, 1, range(50, 54), 6)
    sampled = [name for plan in drain(scheduler) for name in plan.sampled_ids]
    assert sampled.count(0) == 3
    assert sampled.count(1) == 6


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_b46_the_prefix_index_does_not_outgrow_the_pool(policy):
    scheduler = make(policy, num_blocks=16)
    for name in range(100):
        add(scheduler, name, range(20 * name, 20 * name + 9), 1)
        drain(scheduler)
        assert len(scheduler.state.manager.index) <= 16


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_c02_a_second_prompt_computes_what_the_hit_leaves(policy):
    scheduler = make(policy)
    add(scheduler, 0, range(9), 1)
    drain(scheduler)
    add(scheduler, 1, range(9), 1)
    assert batch(step(scheduler)) == [(1, 8, 1)]


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_c10_prompt_plus_outputs_of_exactly_max_model_len_passes(policy):
    scheduler = make(policy, max_model_len=16)
    add(scheduler, 0, range(10), 6)
    drain(scheduler)


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_c14_c15_decode_at_length_8_writes_position_7_in_its_own_block(policy):
    scheduler = make(policy)
    add(scheduler, 0, range(7), 4)
    step(scheduler)
    plan = step(scheduler)
    assert batch(plan) == [(0, 7, 1)]
    assert not plan.new_blocks
    plan = step(scheduler)
    assert batch(plan) == [(0, 8, 1)]
    assert [new.first_index for new in plan.new_blocks] == [2]


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_c19_failed_admissions_leave_everything_as_it_was(policy):
    scheduler = make(policy, num_blocks=7, max_model_len=64)
    add(scheduler, 0, range(8), 1)
    drain(scheduler)
    add(scheduler, 1, range(100, 108), 20)
    step(scheduler)
    add(scheduler, 2, [*range(8), *range(200, 216)], 1)
    before = set(scheduler.free_order())
    for _ in range(3):
        plan = step(scheduler)
        assert not plan.admitted
        taken = {block for new in plan.new_blocks for block in new.block_ids}
        before -= taken
        assert set(scheduler.free_order()) == before


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_c20_hits_that_are_free_count_as_needed(policy):
    scheduler = make(policy, num_blocks=7)
    add(scheduler, 0, range(9), 1)
    drain(scheduler)
    add(scheduler, 1, range(100, 108), 4)
    step(scheduler)
    assert scheduler.num_free_blocks == 5
    add(scheduler, 2, [*range(8), *range(200, 216)], 1)  # 2 free hits and 4 more, 5 are free
    assert not step(scheduler).admitted


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_c22_longer_prompt_hits_all_whole_blocks_of_a_repeated_one(policy):
    scheduler = make(policy, num_blocks=16)
    for name in range(3):
        add(scheduler, name, range(8), 1)
        drain(scheduler)
    add(scheduler, 3, range(12), 1)
    assert step(scheduler).admitted[0].hit_tokens == 8


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_c25_a_preempted_request_resumes_before_one_that_never_started(policy):
    scheduler = make(policy, num_blocks=4, max_num_seqs=2)
    add(scheduler, 0, range(7), 8)
    add(scheduler, 1, range(50, 57), 8)
    add(scheduler, 2, [9], 1)
    plans = drain(scheduler)
    victims = [name for plan in plans for name in plan.preempted]
    order = [a.request_id for plan in plans for a in plan.admitted]
    assert 1 in victims
    assert order.index(2) > len(order) - 1 - order[::-1].index(1)


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_c29_c86_no_more_victims_than_the_shortage_needs(policy):
    scheduler = make(policy, num_blocks=6, max_num_seqs=8)
    for name in range(3):
        add(scheduler, name, range(50 * name, 50 * name + 7), 6)
    for plan in drain(scheduler):
        assert len(plan.preempted) <= 1


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_c39_salt_and_adapter_of_one_name_do_not_share(policy):
    scheduler = make(policy, num_blocks=32)
    for name, keys in enumerate(((("salt", "X"),), (("adapter", "X"),), (), (("salt", "X"),))):
        add(scheduler, name, range(9), 1, extra_keys=keys)
        hit = step(scheduler).admitted[0].hit_tokens
        assert hit == (8 if name == 3 else 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_c40_c43_an_evicted_block_is_no_hit(policy):
    scheduler = make(policy, num_blocks=3)
    add(scheduler, 0, range(8), 1)
    drain(scheduler)
    add(scheduler, 1, range(100, 112), 1)  # takes every block
    drain(scheduler)
    add(scheduler, 2, range(9), 1)
    assert step(scheduler).admitted[0].hit_tokens == 0


def test_bug_c42_both_copies_of_one_step_are_kept():
    scheduler = make("prefill_first", num_blocks=4)
    add(scheduler, 0, range(4), 1)
    add(scheduler, 1, range(4), 3)
    step(scheduler)
    add(scheduler, 2, range(5), 1)
    assert step(scheduler).admitted[0].hit_tokens == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_c47_repeated_prompts_hit(policy):
    scheduler = make(policy, num_blocks=16)
    hits = []
    for name in range(3):
        add(scheduler, name, range(20), 1)
        hits.append(step(scheduler).admitted[0].hit_tokens)
    assert hits == [0, 16, 16]


def test_bug_c65_a_second_prompt_starts_where_the_first_one_ends():
    scheduler = make(max_num_batched_tokens=8, num_blocks=16)
    add(scheduler, 0, range(10), 1)
    add(scheduler, 1, range(50, 60), 1)
    assert batch(step(scheduler)) == [(0, 0, 8)]
    assert batch(step(scheduler)) == [(0, 8, 2), (1, 0, 6)]


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_c67_c71_pool_is_whole_again_with_steps_in_flight(policy):
    scheduler = make(policy, async_scheduling=True)
    add(scheduler, 0, range(5), 3)
    open_plans: list[StepPlan] = []
    while scheduler.has_work or open_plans:
        while scheduler.has_work and len(open_plans) < 2:
            open_plans.append(scheduler.schedule())
        plan = open_plans.pop(0)
        scheduler.commit(plan, [9] * len(plan.sampled_ids))
    assert sorted(scheduler.free_order()) == list(range(8))


def test_bug_c76_admissions_use_up_the_budget():
    scheduler = make(max_num_batched_tokens=10, num_blocks=16)
    for name in range(3):
        add(scheduler, name, range(50 * name, 50 * name + 6), 1)
    assert step(scheduler).num_tokens == 10


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_c77_unfinished_chunks_sample_nothing(policy):
    scheduler = make(policy, max_num_batched_tokens=4)
    add(scheduler, 0, range(12), 1)
    plans = drain(scheduler)
    assert [list(plan.sampled_ids) for plan in plans] == [[], [], [0]]
    assert [list(plan.chunks[0].token_ids) for plan in plans] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_c81_chunking_does_not_change_keys(policy):
    hits = []
    for budget in (100, 20):
        scheduler = make(
            policy, block_size=16, num_blocks=32, max_model_len=256, max_num_batched_tokens=budget
        )
        add(scheduler, 0, range(200), 1)
        drain(scheduler)
        add(scheduler, 1, range(200), 1)
        hits.append(step(scheduler).admitted[0].hit_tokens)
    assert hits == [192, 192]


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_c85_twenty_requests_in_a_pool_just_above_one_all_finish(policy):
    scheduler = make(policy, num_blocks=5, max_num_seqs=8)
    for name in range(20):
        add(scheduler, name, range(30 * name, 30 * name + 9), 9)
    plans = drain(scheduler)
    assert sum(len(plan.preempted) for plan in plans) <= 40


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_c88_each_output_is_counted_once_after_recomputation(policy):
    scheduler = make(policy, block_size=16, num_blocks=4)
    add(scheduler, 0, range(16), 20)
    add(scheduler, 1, range(100, 132), 5)
    plans = drain(scheduler)
    assert sum(len(plan.sampled_ids) for plan in plans) == 25


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_c89_a_preempted_sharer_comes_back_with_the_shared_part(policy):
    scheduler = make(policy, num_blocks=8, max_num_seqs=4)
    shared = list(range(16))
    add(scheduler, 0, [*shared, 100], 12)
    add(scheduler, 1, [*shared, 200], 12)
    resumed = [a for plan in drain(scheduler) for a in plan.admitted if a.resumed]
    assert all(a.hit_tokens >= 16 for a in resumed)


@pytest.mark.parametrize("policy", POLICIES)
def test_bug_c30_a_token_in_flight_of_a_preempted_request_is_counted_once(policy):
    preempted_in_flight = 0
    for num_blocks in range(3, 9):
        for outputs in range(2, 6):
            scheduler = make(
                policy, block_size=2, num_blocks=num_blocks, async_scheduling=True, max_num_seqs=4
            )
            for name in range(3):
                add(scheduler, name, [10 * name], outputs)
            expected: dict[object, list[int]] = {0: [], 1: [], 2: []}
            open_plans: list[StepPlan] = []
            while scheduler.has_work or open_plans:
                while scheduler.has_work and len(open_plans) < 2:
                    open_plans.append(scheduler.schedule())
                if len(open_plans) == 2:
                    in_flight = set(open_plans[0].sampled_ids)
                    preempted_in_flight += len(in_flight & set(open_plans[1].preempted))
                plan = open_plans.pop(0)
                tokens = [100 * int(n) + len(expected[n]) for n in plan.sampled_ids]
                outcome = scheduler.commit(plan, tokens)
                for name, token in zip(outcome.sampled, outcome.token_ids, strict=True):
                    expected[name].append(token)
                for ended in outcome.finished:
                    assert list(ended.output_token_ids) == expected[ended.request_id]
                    assert len(ended.output_token_ids) == outputs
    assert preempted_in_flight > 0


def test_bug_c34_blocks_that_a_step_in_flight_writes_go_only_to_steps_after_it():
    scheduler = make(num_blocks=3, async_scheduling=True)
    add(scheduler, 0, range(5), 6, stop_token_ids=frozenset({7}))
    first, second = scheduler.schedule(), scheduler.schedule()
    held = set(scheduler.block_table(0))
    (ended,) = scheduler.commit(first, [7]).finished
    assert ended.reason == "stop"
    assert held <= set(scheduler.free_order())  # the second step still writes to one of them
    add(scheduler, 1, range(50, 58), 1)
    later = scheduler.schedule()
    assert later.step > second.step and later.admitted[0].request_id == 1
    assert held & {block for new in later.new_blocks for block in new.block_ids}
    assert later.admitted[0].hit_tokens == 0
    with pytest.raises(StepOrderError):
        scheduler.commit(later, [9])  # results come in the order of the steps
    assert not scheduler.commit(second, [8]).sampled
    assert [ended.request_id for ended in scheduler.commit(later, [9]).finished] == [1]


def test_abort_that_waits_for_a_failed_step_takes_effect_and_spares_the_next_owner_of_the_id():
    scheduler = make(max_num_seqs=1)
    add(scheduler, 0, range(5), 3)
    add(scheduler, 1, range(5), 3)
    plan = scheduler.schedule()
    assert scheduler.abort(1) is None
    reasons = {ended.request_id: ended.reason for ended in scheduler.discard(plan)}
    assert reasons == {0: "error", 1: "abort"}
    add(scheduler, 1, range(5), 1)
    plan = scheduler.schedule()
    (ended,) = scheduler.commit(plan, [3]).finished
    assert ended.reason == "length"
