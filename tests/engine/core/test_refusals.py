"""What a kernel refuses before anything changes: configurations and requests that cannot be."""

import pytest

from engine.core import ConfigError, KernelConfig, Prompt, Request, RequestRejected, Scheduler
from engine.core.config import policy_options
from engine.core.policy_registry import POLICIES


def make(num_blocks=16, **options):
    options = {"max_model_len": 64, "block_size": 4, **options}
    return Scheduler(KernelConfig(num_blocks=num_blocks, **options))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_blocks", 0),
        ("block_size", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("max_model_len", 1),
        ("policy", "fifo"),
        ("watermark_blocks", -1),
        ("hash_bits", 65),
        ("block_size", 2.5),
    ],
)
def test_impossible_configurations_name_option_and_value(option, value):
    options = {"num_blocks": 4, "max_model_len": 8, option: value}
    with pytest.raises(ConfigError, match=f"{option}={value!r}"):
        KernelConfig(**options)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "reason"),
    [
        (0, 1, "prompt_empty"),
        (3, 0, "max_tokens"),
        (64, 1, "prompt_too_long"),
        (9, 9, "pool_too_small"),
    ],
)
def test_what_can_never_run_is_refused_before_anything_changes(prompt, max_tokens, reason):
    scheduler = make(num_blocks=4)
    with pytest.raises(RequestRejected) as caught:
        scheduler.add(Request(1, Prompt(range(prompt)), max_tokens))
    assert caught.value.reason == reason
    assert not scheduler.has_work


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
    scheduler = make(4)
    scheduler.add(Request("a", Prompt([1]), 1))
    with pytest.raises(RequestRejected) as caught:
        scheduler.add(request_)
    error, name = caught.value, request_.request_id
    assert (error.request_id, error.reason, error.detail) == (name, reason, detail)
    assert str(error) == f"request {name!r} rejected ({reason}): {detail}"
    assert scheduler.waiting_ids() == ["a"]


@pytest.mark.parametrize("name", [*POLICIES])
def test_an_option_of_another_policy_is_refused_by_name(name):
    for option, (default, owners) in policy_options().items():
        changed = {option: not default if isinstance(default, bool) else default + 1}
        if name in owners:
            make(policy=name, **changed)
            continue
        with pytest.raises(ConfigError, match=rf"^{option}=.*belongs to policy .*not to {name}$"):
            make(policy=name, **changed)


@pytest.mark.parametrize("value", [3, 1, "no", None])
def test_a_flag_that_is_no_boolean_is_refused(value):
    with pytest.raises(ConfigError, match="async_scheduling"):
        make(async_scheduling=value)
