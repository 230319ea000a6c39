"""The small examples of docs/anomalies.md: weaknesses that the policies keep by design."""

from __future__ import annotations

from typing import Any

from engine.arguments.source_tree import docs_folder
from engine.core.config import KernelConfig
from engine.core.plan import StepPlan
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.tokens import Prompt
from properties.timed_runs.anomalies import BY_HAND, kept_part

A, B = [1, 2, 3, 4], [5, 6, 7, 8]


def serve(requests: dict[str, tuple[list[int], int]], **options: Any) -> list[StepPlan]:  # noqa: ANN401
    """All steps until everything has ended; the requests arrive together."""
    config = KernelConfig(**{"block_size": 2, "max_model_len": 32, **options})
    scheduler = Scheduler(config)
    for name, (prompt, outputs) in requests.items():
        scheduler.add(Request(name, Prompt(prompt), outputs))
    return steps_of(scheduler)


def steps_of(scheduler: Scheduler) -> list[StepPlan]:
    """Steps until nothing is left; every token is 0."""
    steps = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        steps.append(plan)
        scheduler.commit(plan, [0] * len(plan.sampled_ids))
    return steps


def preemptions(steps: list[StepPlan]) -> int:
    return sum(len(step.preempted) for step in steps)


def computed(steps: list[StepPlan]) -> int:
    return sum(step.num_tokens for step in steps)


def test_an_admission_leaves_no_room_to_grow_and_the_watermark_does() -> None:
    requests = {"a": (A, 3), "b": (B, 3)}
    as_it_is = serve(requests, num_blocks=4)
    with_room = serve(requests, num_blocks=4, watermark_blocks=1)
    assert (preemptions(as_it_is), computed(as_it_is)) == (1, 14)
    assert (preemptions(with_room), computed(with_room)) == (0, 12)


def hits_after_three_short_requests(policy: str) -> int:
    """A prompt of one full block, three requests of one token, and the prompt again."""
    scheduler = Scheduler(KernelConfig(num_blocks=3, max_model_len=6, block_size=2, policy=policy))
    for prompt in ([1, 2, 3], [9], [8], [7]):
        scheduler.add(Request(str(prompt), Prompt(prompt), 1))
        steps_of(scheduler)
    scheduler.add(Request("again", Prompt([1, 2, 3]), 1))
    return steps_of(scheduler)[0].admitted[0].hit_tokens


def test_prefill_first_reuses_a_cached_block_before_useless_ones_and_mixed_does_not() -> None:
    assert hits_after_three_short_requests("prefill_first") == 0
    assert hits_after_three_short_requests("mixed") == 2


def test_admission_by_the_next_chunk_takes_in_prompts_that_are_thrown_out() -> None:
    requests = {"a": ([1, 2, 3, 4, 5, 6], 3), "b": ([7, 8, 9, 10, 11, 12], 1)}
    options = {"num_blocks": 4, "max_num_batched_tokens": 4}
    by_chunk = serve(requests, **options, reserve_full_prompt=False)
    whole = serve(requests, **options)
    assert preemptions(by_chunk) == 1
    assert preemptions(whole) == 0


def first_step_of(name: str, steps: list[StepPlan]) -> int:
    return next(
        place for place, step in enumerate(steps) if name in {e.request_id for e in step.entries}
    )


def test_a_half_done_prompt_of_prefill_first_holds_blocks_that_nobody_uses_yet() -> None:
    requests = {"long": (list(range(11)), 2), "short": ([20], 1)}
    options = {"num_blocks": 3, "block_size": 4, "policy": "prefill_first"}
    small = serve(requests, **options, max_num_batched_tokens=6)
    large = serve(requests, **options, max_num_batched_tokens=16)
    assert first_step_of("short", small) == 3
    assert first_step_of("short", large) == 2


def test_writing_the_measured_part_again_keeps_what_is_written_by_hand() -> None:
    page = (docs_folder() / "anomalies.md").read_text()
    kept = kept_part(page)
    assert kept.startswith(BY_HAND)
    assert page.endswith(kept)
    assert kept_part("nothing by hand") == ""
