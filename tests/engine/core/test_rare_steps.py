"""Steps that random workloads seldom meet: mutants that only they kill lived before."""

import pytest

from engine.core import (
    KernelConfig,
    Prompt,
    Request,
    Scheduler,
    StepOrderError,
    UnknownRequest,
    audit,
)
from engine.core.hashing import ChainNode
from engine.core.policies.prefill_first import PrefillFirstPolicy
from engine.core.sequence import Sequence


def make(num_blocks=16, **options):
    sizes = {"max_model_len": 64, "block_size": 2, "max_num_batched_tokens": 32}
    return Scheduler(KernelConfig(num_blocks=num_blocks, **{**sizes, **options}))


def request(name, tokens, max_tokens=4, **options):
    return Request(name, Prompt(tokens), max_tokens, **options)


def step(scheduler, token=70, stopped=()):
    plan = scheduler.schedule()
    outcome = scheduler.commit(plan, [token] * len(plan.sampled_ids), stopped)
    audit(scheduler)
    return plan, outcome


def commit(scheduler, plan, token=70, stopped=()):
    return scheduler.commit(plan, [token] * len(plan.sampled_ids), stopped)


def hits_of(plan):
    return {admission.request_id: admission.hit_tokens for admission in plan.admitted}


def test_a_new_sequence_and_a_new_key_know_nothing_yet():
    sequence = Sequence(request(1, [5, 6]), 6)
    for name in ("num_computed_tokens", "num_cached_blocks", "base", "arrival", "arrival_index",
                 "admission_index", "row", "num_synced", "num_preemptions"):  # fmt: skip
        assert getattr(sequence, name) == 0, name
    assert sequence.block_table == [] and sequence.root is None and not sequence.decoding
    assert ChainNode(1, None, b"").collision is None


def test_known_tokens_are_prompt_and_committed_outputs():
    scheduler = make()
    scheduler.add(request(1, [5, 6, 7]))
    assert scheduler.num_known_tokens(1) == 3
    step(scheduler)
    assert scheduler.num_known_tokens(1) == 4
    step(scheduler)
    assert scheduler.num_known_tokens(1) == 5


@pytest.mark.parametrize("bound", [False, True])
def test_prefill_first_tells_whether_it_bounds_the_holders(bound):
    config = KernelConfig(8, 64, block_size=2, policy="prefill_first", bound_holders=bound)
    assert PrefillFirstPolicy.bounds_holders(config) is bound


def test_two_stops_in_one_step_end_both():
    scheduler = make()
    for name in (1, 2):
        scheduler.add(request(name, [name]))
    _, outcome = step(scheduler, stopped=[1, 2])
    assert [(ended.request_id, ended.reason) for ended in outcome.finished] == [
        (1, "stop"),
        (2, "stop"),
    ]


def test_every_stop_must_have_a_token_to_stop_at():
    scheduler = make()
    for name in (1, 2):
        scheduler.add(request(name, [name]))
    plan = scheduler.schedule()
    scheduler.add(request(3, [3]))
    with pytest.raises(StepOrderError, match="3 has no token"):
        scheduler.commit(plan, [70, 70], [1, 3])
    assert commit(scheduler, plan).finished == ()


def test_a_stop_at_a_void_token_is_refused():
    scheduler = make(async_scheduling=True)
    scheduler.add(request(1, [1], stop_token_ids=frozenset({7})))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert commit(scheduler, first, 7).finished[0].reason == "stop"
    with pytest.raises(UnknownRequest):
        scheduler.commit(second, [70], [1])
    assert len(commit(scheduler, second).sampled) == 0


def test_only_the_oldest_open_plan_can_be_discarded():
    scheduler = make(async_scheduling=True)
    scheduler.add(request(1, [1]))
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(StepOrderError, match="not the oldest"):
        scheduler.discard(second)
    commit(scheduler, first)
    commit(scheduler, second)


def test_an_id_that_no_open_plan_computes_for_can_be_used_again():
    scheduler = make(max_num_seqs=1, async_scheduling=True)
    scheduler.add(request(1, [1]))
    scheduler.add(request(2, [2]))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert scheduler.abort(2) is None
    assert commit(scheduler, first).finished[0].reason == "abort"
    scheduler.add(request(2, [3]))
    commit(scheduler, second)


def test_tokens_are_in_batch_order_behind_chunks_that_sample_none():
    """Two half-done prompts before decodes, and one whose prompt completes between them."""
    scheduler = make(32, long_prefill_token_threshold=2, max_num_batched_tokens=12)
    scheduler.add(request(1, range(10, 20)))
    scheduler.add(request(2, range(30, 40)))
    scheduler.add(request(3, [50]))
    scheduler.add(request(4, range(60, 66)))
    scheduler.add(request(5, [80]))
    step(scheduler)
    plan, _ = step(scheduler)
    assert (
        plan.sampled_ids
        == tuple([entry.request_id for entry in plan.entries if entry.samples])
        == (3, 5)
    )
    plan, _ = step(scheduler)
    assert [entry.request_id for entry in plan.entries] == [1, 2, 3, 4, 5]
    assert plan.sampled_ids == (3, 4, 5)


def test_two_victims_give_way_to_one_chunk():
    scheduler = make(
        6, block_size=4, long_prefill_token_threshold=8, reserve_full_prompt=False,
        max_num_batched_tokens=16,
    )  # fmt: skip
    scheduler.add(request(1, range(20), 2))
    scheduler.add(request(2, [100], 3))
    scheduler.add(request(3, [200], 3))
    step(scheduler)
    plan, _ = step(scheduler)
    assert plan.preempted == () and scheduler.num_free_blocks == 0
    scheduler = make(
        6, block_size=4, long_prefill_token_threshold=8, reserve_full_prompt=False,
        max_num_batched_tokens=16,
    )  # fmt: skip
    scheduler.add(request(1, range(23), 1))
    for name in (2, 3):
        scheduler.add(request(name, [100 * name], 6))
    step(scheduler)
    step(scheduler)
    plan, _ = step(scheduler)
    assert plan.preempted == (3, 2)
    assert [entry.request_id for entry in plan.entries] == [1]


def spread(policy, num_blocks=16, **options):
    """One half-done prompt and a newer decode; prompts are held back every second step."""
    scheduler = make(
        num_blocks, policy=policy, prefill_schedule_interval=2, long_prefill_token_threshold=2,
        max_num_batched_tokens=3, enable_prefix_caching=True, **options,
    )  # fmt: skip
    scheduler.add(request(1, range(10, 20), 1))
    scheduler.add(request(2, [30], 9))
    plan, _ = step(scheduler)
    assert [tuple(entry)[:3] for entry in plan.entries] == [(1, 0, 2), (2, 0, 1)]
    return scheduler


@pytest.mark.parametrize("policy", ["mixed", "priority"])
def test_who_keeps_its_blocks_but_is_beyond_the_budget_is_not_served(policy):
    """As below, with blocks so short that the newest gives way."""
    scheduler = spread(policy, num_blocks=5)
    scheduler.add(request(3, [40], 9))
    scheduler.add(request(4, [50], 9, priority=3))
    plan, _ = step(scheduler)
    assert [tuple(entry)[:3] for entry in plan.entries] == [(2, 1, 1), (3, 0, 1), (4, 0, 1)]
    plan, _ = step(scheduler)
    assert plan.preempted == (4,)
    assert [tuple(entry)[:3] for entry in plan.entries] == [(1, 2, 2), (2, 2, 1)]


@pytest.mark.parametrize("policy", ["mixed", "priority"])
def test_decodes_beyond_the_budget_wait_behind_an_older_prompt(policy):
    """A step that holds prompts back can admit more than the next one has budget for."""
    scheduler = spread(policy)
    scheduler.add(request(3, [40], 9))
    plan, _ = step(scheduler)
    assert [tuple(entry)[:3] for entry in plan.entries] == [(2, 1, 1), (3, 0, 1)]
    plan, _ = step(scheduler)
    assert [tuple(entry)[:3] for entry in plan.entries] == [(1, 2, 2), (2, 2, 1)]
    plan, _ = step(scheduler)
    assert [tuple(entry)[:3] for entry in plan.entries] == [(2, 3, 1), (3, 1, 1)]


def test_a_step_without_the_only_decode_is_no_lack_of_progress():
    """The decode gives way to itself while the half-done prompt is held back (P-R4)."""
    scheduler = make(
        2, prefill_schedule_interval=2, long_prefill_token_threshold=2, reserve_full_prompt=False,
    )  # fmt: skip
    scheduler.add(request(1, [10, 11, 12], 2))
    scheduler.add(request(2, [20, 21], 3))
    step(scheduler)
    plan, _ = step(scheduler)
    assert plan.num_entries == 0 and plan.preempted == (2,)


@pytest.mark.parametrize("policy", ["mixed", "priority"])
def test_one_block_too_few_is_too_few_for_a_lonely_request_too(policy):
    scheduler = make(1, policy=policy, reject_impossible=False)
    scheduler.add(request(1, [1, 2, 3]))
    plan, _ = step(scheduler)
    assert plan.num_entries == 0 and scheduler.num_waiting == 1


def test_an_adaptive_threshold_needs_a_threshold():
    scheduler = make(long_prefill_token_threshold_adaptive=True, max_num_batched_tokens=20)
    for name in (1, 2):
        scheduler.add(request(name, range(100 * name, 100 * name + 15)))
    plan, _ = step(scheduler)
    assert [tuple(entry)[:3] for entry in plan.entries] == [(1, 0, 15), (2, 0, 5)]


def test_no_run_is_foreseen_while_prefill_is_spread():
    scheduler = make(prefill_schedule_interval=2)
    scheduler.add(request(1, [1], 20))
    step(scheduler)
    assert scheduler.decode_horizon(scheduler.schedule()) == 1


@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_the_head_alone_decides_whether_a_run_admits_anybody(policy):
    scheduler = make(6, policy=policy)
    scheduler.add(request(1, [1, 2], 8))
    step(scheduler)
    step(scheduler)
    scheduler.add(request(2, range(20, 29), 1))  # needs five blocks, four are free
    scheduler.add(request(3, [1, 2, 40], 1))  # would find one of them
    plan = scheduler.schedule()
    assert (scheduler.num_waiting, scheduler.num_free_blocks) == (2, 4)
    assert scheduler.decode_horizon(plan) == 6


@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_one_decode_that_may_fill_a_block_for_the_head_ends_the_run(policy):
    scheduler = make(8, policy=policy)
    scheduler.add(request(1, range(7), 8))
    scheduler.add(request(2, [50], 8))
    step(scheduler)
    scheduler.add(request(3, [0, 1, *range(60, 70)], 1))
    plan = scheduler.schedule()
    assert scheduler.num_waiting == 1
    assert scheduler.decode_horizon(plan) == 1  # the second has no block yet


def test_a_horizon_that_was_told_holds_no_longer_after_an_abort():
    scheduler = make()
    for name in (1, 2):
        scheduler.add(request(name, [name], 9))
    step(scheduler)
    plan = scheduler.schedule()
    assert scheduler.decode_horizon(plan) > 2
    assert scheduler.abort(2) is None
    with pytest.raises(StepOrderError, match="cannot take 2 steps"):
        scheduler.run_decode(plan, 2, lambda row: [70, 70])
    assert commit(scheduler, plan).finished[0].reason == "abort"


def test_a_step_with_a_chunk_and_one_behind_another_are_no_runs():
    scheduler = make()
    scheduler.add(request(1, [1], 9))
    assert scheduler.decode_horizon(scheduler.schedule()) == 1
    scheduler = make(async_scheduling=True)
    scheduler.add(request(1, [1], 9))
    step(scheduler)
    first = scheduler.schedule()
    scheduler.schedule()
    assert scheduler.decode_horizon(first) == 1


def test_the_index_forgets_a_salt_with_the_last_of_its_blocks():
    """However often its chain grew."""
    scheduler = make(8)
    scheduler.add(request(1, [1, 2, 3], 9, extra_keys=(("salt", "a"),)))
    while scheduler.has_work:
        step(scheduler)
    manager = scheduler.state.manager
    assert len(manager.index) > 3
    scheduler.add(request(2, range(50, 65), 2, extra_keys=(("salt", "b"),)))
    while scheduler.has_work:
        step(scheduler)
    assert {node.parent.extra_keys for node in manager.index.nodes() if node.parent.parent is None}
    assert [key for key in manager.index._roots] == [(("salt", "b"),)]


def test_keys_of_a_withdrawn_entry_stay_withdrawn():
    """`priority`: a chunk of three blocks is served and withdrawn; nobody may hit its blocks."""
    scheduler = make(
        13, policy="priority", long_prefill_token_threshold=6, threshold_when_alone=True,
        reserve_full_prompt=False, max_num_batched_tokens=20,
    )  # fmt: skip
    prompt = list(range(100, 124))
    scheduler.add(request(1, prompt, 1, priority=5))
    step(scheduler)
    scheduler.add(request(2, [7], 3, priority=0))
    step(scheduler)
    step(scheduler)
    plan, _ = step(scheduler)
    assert plan.preempted == (1,)  # it was older, so its blocks had been taken already
    # Its tenth block is made anew, in the half-filled one that the second request leaves.
    scheduler.add(request(3, prompt[:20], 1, priority=1))
    plan, _ = step(scheduler)
    assert hits_of(plan) == {3: 18, 1: 20}  # and not 22: nobody computed the eleventh


def test_a_block_of_outputs_gets_its_key_while_blocks_are_short():
    """`priority` serves one by one then, and books the key of a decode's block at once."""
    scheduler = make(3, policy="priority")
    scheduler.add(request(1, [1, 2], 3, priority=0))
    scheduler.add(request(2, [9], 4, priority=1))
    step(scheduler, 71)
    step(scheduler, 72)
    plan, outcome = step(scheduler, 73)
    assert plan.preempted == (2,) and [e.request_id for e in plan.entries] == [1]
    assert outcome.finished[0].request_id == 1
    scheduler.abort(2)
    scheduler.add(request(3, [1, 2, 71, 72, 5], 1))
    plan, _ = step(scheduler)
    assert hits_of(plan) == {3: 4}
