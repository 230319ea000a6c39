"""How requests are refused at the door, how long they may get, and in which order they end."""

import pytest

from engine.core import KernelConfig, Prompt, Request, RequestRejected, Scheduler

POLICIES = ("mixed", "prefill_first")


def make(policy="mixed", **options):
    sizes = {"num_blocks": 4, "max_model_len": 64, "block_size": 4, "max_num_batched_tokens": 64}
    return Scheduler(KernelConfig(policy=policy, **{**sizes, **options}))


REFUSALS = [
    (Request("a", Prompt(range(3)), 1), "duplicate_id", "a live request has this id"),
    (Request("b", Prompt([]), 1), "prompt_empty", "the prompt has 0 tokens, at least 1 is needed"),
    (Request("b", Prompt([1]), 0), "max_tokens", "max_tokens=0, at least 1 is needed"),
    (
        Request("b", Prompt([1]), 2, min_tokens=3),
        "min_tokens",
        "min_tokens=3 is not within 0..max_tokens=2",
    ),
    (
        Request("b", Prompt(range(70)), 1),
        "prompt_too_long",
        "the prompt has 70 tokens, max_model_len=64 allows at most 63",
    ),
    (
        Request("b", Prompt(range(9)), 10),
        "pool_too_small",
        "18 tokens need 5 blocks of 4, the pool has 4",
    ),
]


@pytest.mark.parametrize(("request_", "reason", "detail"), REFUSALS, ids=[r[1] for r in REFUSALS])
def test_a_refusal_names_the_request_and_the_number_and_limit_that_clash(request_, reason, detail):
    scheduler = make()
    scheduler.add(Request("a", Prompt([1]), 1))
    with pytest.raises(RequestRejected) as caught:
        scheduler.add(request_)
    error, name = caught.value, request_.request_id
    assert (error.request_id, error.reason, error.detail) == (name, reason, detail)
    assert str(error) == f"request {name!r} rejected ({reason}): {detail}"
    assert scheduler.waiting_ids() == ["a"]


@pytest.mark.parametrize(
    ("policy", "bound_model_len", "outputs"),
    [
        ("mixed", True, 5),
        ("mixed", False, 5),  # the option is one of prefill_first
        ("prefill_first", True, 5),
        ("prefill_first", False, 9),
    ],
)
def test_outputs_end_at_the_model_length_unless_prefill_first_is_told_otherwise(
    policy, bound_model_len, outputs
):
    scheduler = make(policy, max_model_len=8, bound_model_len=bound_model_len)
    scheduler.add(Request(0, Prompt([1, 2, 3]), 9))
    finished = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        finished += scheduler.commit(plan, [7] * len(plan.sampled_ids)).finished
    assert [(ended.reason, len(ended.output_token_ids)) for ended in finished] == [
        ("length", outputs)
    ]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_an_abort_out_of_waiting_is_told_before_the_ends_of_the_batch(policy, earlier):
    """However many requests ran before, the very first one included."""
    scheduler = make(policy, max_num_seqs=1)
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
