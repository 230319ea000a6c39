"""What the step log costs: an undisturbed decode step, a decode run, and reading.

python -m pytest benchmarks/test_steplog_speed.py --benchmark-only
"""

from __future__ import annotations

import pytest

from engine.core import KernelConfig, Prompt, Request, Scheduler
from engine.core.plan import DecodeRun, StepOutcome
from engine.steplog.api import DecodeRunEvent, LogHeader, StepEvent, StepLogReader, StepLogWriter

ROWS = 256
CONFIG = KernelConfig(num_blocks=40_000, max_model_len=40_000, max_num_batched_tokens=8192)


@pytest.fixture
def decoding():
    """A scheduler with 256 sequences that decode, and an open plan."""
    scheduler = Scheduler(CONFIG)
    for number in range(ROWS):
        prompt = Prompt(range(number * 1000, number * 1000 + 17))
        scheduler.add(Request(number, prompt, 30_000))
    plan = scheduler.schedule()
    scheduler.commit(plan, [1] * ROWS)
    return scheduler, scheduler.schedule()


def test_step_that_continues_a_stretch(benchmark, decoding, tmp_path):
    scheduler, plan = decoding
    steps = []
    tokens = [1] * ROWS
    for _ in range(2_000):
        steps.append((plan, scheduler.commit(plan, tokens)))
        plan = scheduler.schedule()
    with StepLogWriter(tmp_path / "log.jsonl", LogHeader("engine", CONFIG)) as log:
        log.step(StepEvent(*steps[0], 0, 5))
        remaining = iter(steps[1:])
        benchmark.pedantic(
            lambda plan, outcome: log.step(StepEvent(plan, outcome, 5, 5)),
            setup=lambda: (next(remaining), {}),
            rounds=1_500,
        )


def test_decode_run_as_one_record(benchmark, decoding, tmp_path):
    _, plan = decoding
    ids = plan.decode.request_ids
    header = LogHeader("sim", CONFIG, outputs_in_adds=True)
    outcome = StepOutcome(plan.step + 99, ids, [1] * ROWS, ())
    run = DecodeRun(plan.step, 100, plan.decode, (), plan.num_free_blocks, outcome)
    durations = [4_000_000 + step for step in range(100)]
    with StepLogWriter(tmp_path / "log.jsonl", header) as log:
        # Each call begins with the same step, so each flushes the record before it.
        benchmark(log.decode_run, DecodeRunEvent(plan, run, 0, durations))


def test_reading_a_record_of_a_hundred_steps(benchmark, decoding, tmp_path):
    _, plan = decoding
    ids = plan.decode.request_ids
    path = tmp_path / "log.jsonl"
    with StepLogWriter(path, LogHeader("sim", CONFIG, outputs_in_adds=True)) as log:
        outcome = StepOutcome(plan.step + 99, ids, [1] * ROWS, ())
        run = DecodeRun(plan.step, 100, plan.decode, (), plan.num_free_blocks, outcome)
        log.decode_run(DecodeRunEvent(plan, run, 0, [4_000_000 + step for step in range(100)]))
    records = benchmark(lambda: list(StepLogReader(path)))
    assert [record.num_steps for record in records] == [100]
