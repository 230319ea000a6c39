import copy

import pytest

from engine.core import (
    KernelConfig,
    Prompt,
    Request,
    Scheduler,
    SchedulerDead,
    StepOrderError,
    UnknownRequest,
    audit,
)


def make(num_blocks=16, **options):
    options = {"max_model_len": 64, "block_size": 4, **options}
    return Scheduler(KernelConfig(num_blocks=num_blocks, **options))


def request(name, prompt, max_tokens=4, **options):
    tokens = range(1000 * name, 1000 * name + prompt) if isinstance(prompt, int) else prompt
    return Request(name, Prompt(tokens), max_tokens, **options)


def step(scheduler, token=5):
    plan = scheduler.schedule()
    outcome = scheduler.commit(plan, [token] * len(plan.sampled_ids))
    audit(scheduler)
    return plan, outcome


def entries(plan):
    return [tuple(entry)[:3] for entry in plan.entries]


def test_a_request_that_just_fits_the_pool_completes():
    scheduler = make(num_blocks=4)
    scheduler.add(request(1, 9, 8))  # 16 tokens are written, the 17th is only sampled
    finished = []
    while scheduler.has_work:
        finished += step(scheduler)[1].finished
    assert [(ended.reason, len(ended.output_token_ids)) for ended in finished] == [("length", 8)]


def test_max_tokens_beyond_the_model_length_ends_with_reason_length():
    scheduler = make(max_model_len=12)
    scheduler.add(request(1, 9, 100))
    finished = []
    while scheduler.has_work:
        finished += step(scheduler)[1].finished
    assert [(ended.reason, len(ended.output_token_ids)) for ended in finished] == [("length", 3)]


def test_plans_share_the_decode_part_while_the_same_sequences_decode():
    scheduler = make()
    for name in (1, 2):
        scheduler.add(request(name, 5, 8))
    step(scheduler)
    first, _ = step(scheduler)
    second, _ = step(scheduler)
    assert second.decode is first.decode
    assert entries(first) == [(1, 5, 1), (2, 5, 1)]
    assert entries(second) == [(1, 6, 1), (2, 6, 1)]


def test_a_budget_below_the_number_of_decodes_serves_the_oldest():
    for policy, running in (("mixed", 4), ("prefill_first", 6)):
        scheduler = make(max_num_batched_tokens=4, policy=policy)
        for name in (1, 2, 3, 4, 5, 6):
            scheduler.add(request(name, 2, 9))
        served = []
        while scheduler.has_work:
            oldest = scheduler.running_ids()[:4]
            plan, _ = step(scheduler)
            assert plan.num_tokens <= 4
            if plan.is_pure_decode and plan.num_running == running:
                assert [entry.request_id for entry in plan.entries] == oldest
                served.append(plan.step)
        assert served


@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_abort_works_in_every_state(policy):
    scheduler = make(policy=policy, max_num_batched_tokens=4, max_num_seqs=2)
    for name, prompt in ((1, 3), (2, 9), (3, 2)):
        scheduler.add(request(name, prompt, 8))
    step(scheduler)
    plan = scheduler.schedule()
    assert scheduler.abort(1) is None
    outcome = scheduler.commit(plan, [5] * len(plan.sampled_ids))
    assert [(ended.request_id, ended.reason) for ended in outcome.finished] == [(1, "abort")]
    assert 1 not in outcome.sampled
    audit(scheduler)
    assert scheduler.abort(3).reason == "abort"
    assert scheduler.abort(2).reason == "abort"
    assert scheduler.num_free_blocks == 16
    with pytest.raises(UnknownRequest):
        scheduler.abort(2)


@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_discard_takes_back_the_keys_of_a_failed_step(policy):
    scheduler = make(policy=policy)
    scheduler.add(request(1, 9))
    failed = scheduler.discard(scheduler.schedule())
    assert [(ended.request_id, ended.reason) for ended in failed] == [(1, "error")]
    audit(scheduler)
    assert scheduler.num_free_blocks == 16
    scheduler.add(request(1, 9))
    plan, _ = step(scheduler)
    assert plan.admitted[0].hit_tokens == 0  # nothing points at KV that was never written


def test_calls_out_of_order_raise_and_change_nothing():
    scheduler = make()
    with pytest.raises(StepOrderError):
        scheduler.schedule()
    scheduler.add(request(1, 5))
    plan = scheduler.schedule()
    with pytest.raises(StepOrderError):
        scheduler.schedule()
    with pytest.raises(StepOrderError):
        scheduler.commit(plan, [])
    scheduler.commit(plan, [5])
    with pytest.raises(StepOrderError):
        scheduler.commit(plan, [5])


def test_min_tokens_holds_stops_back():
    scheduler = make()
    scheduler.add(request(1, 3, 9, stop_token_ids=frozenset([5]), min_tokens=3))
    finished = []
    while scheduler.has_work:
        finished += step(scheduler)[1].finished
    assert [(ended.reason, len(ended.output_token_ids)) for ended in finished] == [("stop", 4)]


def test_a_stop_string_ends_the_request_with_reason_stop():
    scheduler = make()
    scheduler.add(request(1, 3, 9))
    plan = scheduler.schedule()
    outcome = scheduler.commit(plan, [7], stopped=[1])
    assert outcome.finished[0].reason == "stop"


def test_a_copy_goes_its_own_way():
    scheduler = make()
    scheduler.add(request(1, 6, 8))
    step(scheduler)
    twin = copy.deepcopy(scheduler)
    step(twin, token=9)
    assert twin.output_token_ids(1).tolist() == [5, 9]
    assert scheduler.output_token_ids(1).tolist() == [5]
    audit(scheduler)


def run_all(scheduler, requests, fast):
    """Every decision of a run with tokens that depend on request and position only."""
    seen = []
    pending = list(requests)
    outputs = {r.request_id: 0 for r in requests}
    while pending or scheduler.has_work:
        if pending and (len(seen) % 5 == 0 or not scheduler.has_work):
            scheduler.add(pending.pop(0))
        plan = scheduler.schedule()
        steps = scheduler.decode_horizon(plan) if fast and plan.is_pure_decode else 1
        steps = min(steps, 5 - len(seen) % 5)
        if steps > 1:
            ids = plan.decode.request_ids

            def tokens(row, ids=ids, steps=steps):
                return [(ids[row] * 31 + outputs[ids[row]] + k) % 7 for k in range(steps)]

            run = scheduler.run_decode(plan, steps, tokens)
            for offset in range(steps):
                blocks = [new for at, new in run.new_blocks if at == offset]
                ended = run.outcome.finished if offset == steps - 1 else ()
                seen.append((list(ids), blocks, [tuple(e) for e in ended]))
            for name in ids:
                outputs[name] += steps
        else:
            sampled = list(plan.sampled_ids)
            values = [(name * 31 + outputs[name]) % 7 for name in sampled]
            for name in sampled:
                outputs[name] += 1
            ids = [entry.request_id for entry in plan.entries]
            outcome = scheduler.commit(plan, values)
            seen.append((ids, list(plan.new_blocks), [tuple(e) for e in outcome.finished]))
        audit(scheduler)
    return seen, scheduler.free_order()


@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
@pytest.mark.parametrize("num_blocks", [9, 40])
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_runs_of_decode_steps_equal_single_steps(policy, num_blocks, block_size):
    blocks = num_blocks * 4 // block_size
    requests = [request(name, 3 + name % 9, 5 + 3 * name % 17) for name in range(1, 13)]
    runs = [
        run_all(make(blocks, policy=policy, block_size=block_size), requests, fast)
        for fast in (False, True)
    ]
    assert runs[0] == runs[1]


def test_async_scheduling_gives_the_same_tokens_one_plan_ahead():
    def run(is_async):
        scheduler = make(12, async_scheduling=is_async, max_num_batched_tokens=8)
        for name in range(1, 9):
            scheduler.add(request(name, 3 + name, 6, stop_token_ids=frozenset([3])))
        outputs = {}
        plans = []
        count = dict.fromkeys(range(1, 9), 0)
        while scheduler.has_work or plans:
            while scheduler.has_work and len(plans) <= is_async:
                plans.append(scheduler.schedule())
                if not is_async:
                    break
            plan = plans.pop(0)
            values = []
            for name in plan.sampled_ids:
                values.append((name * 5 + count[name]) % 11)
                count[name] += 1
            for ended in scheduler.commit(plan, values).finished:
                outputs[ended.request_id] = (ended.reason, list(ended.output_token_ids))
        assert scheduler.num_free_blocks == 12
        return outputs

    assert run(is_async=False) == run(is_async=True)


@pytest.mark.parametrize(
    ("policy", "bound_model_len", "outputs"),
    [
        ("mixed", True, 5),
        ("prefill_first", True, 5),
        ("prefill_first", False, 9),
    ],
)
def test_outputs_end_at_the_model_length_unless_prefill_first_is_told_otherwise(
    policy, bound_model_len, outputs
):
    scheduler = make(policy=policy, max_model_len=8, bound_model_len=bound_model_len)
    scheduler.add(Request(0, Prompt([1, 2, 3]), 9))
    finished = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        finished += scheduler.commit(plan, [7] * len(plan.sampled_ids)).finished
    assert [(ended.reason, len(ended.output_token_ids)) for ended in finished] == [
        ("length", outputs)
    ]


@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_an_abort_out_of_waiting_is_told_before_the_ends_of_the_batch(policy, earlier):
    """However many requests ran before, the very first one included."""
    scheduler = make(policy=policy, max_num_seqs=1)
    for name in range(earlier):
        scheduler.add(Request(name, Prompt([name]), 1))
        scheduler.commit(scheduler.schedule(), [7])
    scheduler.add(Request("runs", Prompt([1, 2]), 1))
    scheduler.add(Request("waits", Prompt([1, 2]), 1))
    plan = scheduler.schedule()
    scheduler.abort("waits")
    finished = scheduler.commit(plan, [7]).finished
    assert [(ended.request_id, ended.reason) for ended in finished] == [
        ("waits", "abort"),
        ("runs", "length"),
    ]


def test_a_call_that_is_cut_short_leaves_a_scheduler_that_refuses_everything(monkeypatch):
    scheduler = make()
    scheduler.add(Request(0, Prompt([1, 2, 3]), 9))

    def interrupted(state, step):
        raise KeyboardInterrupt

    monkeypatch.setattr(scheduler.policy, "fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scheduler.schedule()
    for call in (
        scheduler.schedule,
        lambda: scheduler.abort(0),
        lambda: scheduler.add(Request(1, Prompt([1]), 1)),
    ):
        with pytest.raises(SchedulerDead, match=r"an earlier schedule\(\) was cut short"):
            call()


def test_a_commit_that_refuses_its_arguments_has_changed_nothing():
    scheduler = make()
    scheduler.add(Request(0, Prompt([1, 2, 3]), 9))
    scheduler.add(Request(1, Prompt([4, 5]), 9))
    plan = scheduler.schedule()
    scheduler.add(Request(2, Prompt([6]), 9))
    for tokens, stopped in (([1], ()), ([1, "x"], ()), ([1, 2**63], ()), ([1, 2], [2])):
        with pytest.raises(StepOrderError, match=r"^commit\(\) of step 0: "):
            scheduler.commit(plan, tokens, stopped)
    buffer = [7, 8]
    outcome = scheduler.commit(plan, buffer)
    buffer[:] = [0, 0]
    assert list(outcome.token_ids) == [7, 8]
    assert [list(scheduler.output_token_ids(name)) for name in (0, 1)] == [[7], [8]]


def test_a_run_longer_than_its_horizon_is_refused():
    scheduler = make(max_model_len=64)
    scheduler.add(Request(0, Prompt([1, 2, 3]), 5))
    scheduler.commit(scheduler.schedule(), [7])
    plan = scheduler.schedule()
    horizon = scheduler.decode_horizon(plan)
    with pytest.raises(StepOrderError, match="cannot take"):
        scheduler.run_decode(plan, horizon + 1, lambda row: [1] * 99)
    assert scheduler.run_decode(plan, horizon, lambda row: [1] * 99).num_steps == horizon


def test_a_request_at_its_known_end_keeps_its_number_of_tokens_while_others_decode():
    kernel = Scheduler(
        KernelConfig(num_blocks=8, max_model_len=16, block_size=2, async_scheduling=True)
    )
    kernel.add(Request("ends", Prompt([5]), 1))
    kernel.add(Request("goes on", Prompt([5]), 4))
    kernel.schedule()
    kernel.schedule()
    assert (kernel.num_tokens("ends"), kernel.num_computed_tokens("ends")) == (2, 1)
    assert (kernel.num_tokens("goes on"), kernel.num_computed_tokens("goes on")) == (3, 2)
