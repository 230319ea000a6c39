"""Host time of the kernel: one steady decode step of 256 sequences, and a run of such steps."""

import random

import pytest

from engine.core import KernelConfig, Prompt, Request, Scheduler

ROWS = 256


def steady(policy: str) -> Scheduler:
    """A scheduler whose 256 sequences all decode, at staggered places of their blocks."""
    config = KernelConfig(
        num_blocks=100_000, max_model_len=8192, max_num_batched_tokens=16_384, policy=policy
    )
    scheduler = Scheduler(config)
    for name in range(ROWS):
        scheduler.add(Request(name, Prompt(range(name * 10_000, name * 10_000 + 200 + name)), 7000))
    while True:
        plan = scheduler.schedule()
        scheduler.commit(plan, [7] * len(plan.sampled_ids))
        if plan.is_pure_decode and plan.num_entries == ROWS:
            return scheduler


@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_schedule_and_commit_of_a_256_sequence_decode_step(benchmark, policy):
    scheduler = steady(policy)
    rng = random.Random(0)
    columns = [[rng.randrange(150_000) for _ in range(ROWS)] for _ in range(64)]
    turn = iter(range(10**9))

    def one_step():
        plan = scheduler.schedule()
        scheduler.commit(plan, columns[next(turn) % 64])

    benchmark.pedantic(one_step, rounds=2000, iterations=1, warmup_rounds=50)


@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_run_of_1000_decode_steps_of_256_sequences(benchmark, policy):
    def prepare():
        scheduler = steady(policy)
        return (scheduler, scheduler.schedule()), {}

    def run(scheduler, plan):
        scheduler.run_decode(plan, 1000, lambda row: range(row * 10_000, row * 10_000 + 1000))

    benchmark.pedantic(run, setup=prepare, rounds=5, iterations=1)
