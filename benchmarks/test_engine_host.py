"""Host time of the engine's steps, with a device that answers at once.

    python -m pytest benchmarks/test_engine_host.py

What is timed is all that the host does in a decode step of 256 rows besides the launch itself:
schedule, build the command, commit, follow the requests.
"""

import random
from array import array

import pytest

from engine.core import KernelConfig, Prompt, Request, Scheduler
from engine.sampling_params import SamplingParams
from engine.step.builder import RequestSampling, StepBuilder
from engine.step.loop import StepLoop
from engine.worker.command import StepResult
from engine.worker.info import RunnerInfo

NUM_ROWS = 256


class InstantExecutor:
    """Answers every sampled row with the same token."""

    is_dead = False

    def __init__(self):
        self.info = RunnerInfo(1, 16, 4096, "none", "none", "none", "none", 1, (NUM_ROWS,))
        self._samples = []

    def launch(self, command):
        self._samples.append(command.num_samples)

    def collect(self):
        return StepResult(array("q", [7]) * self._samples.pop(0))

    def reset(self):
        self._samples.clear()


def steady_loop(asynchronous, block_size):
    config = KernelConfig(
        num_blocks=500_000 // block_size,
        max_model_len=100_000,
        block_size=block_size,
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=16384,
        async_scheduling=asynchronous,
    )
    builder = StepBuilder(NUM_ROWS, -(-config.max_model_len // block_size))
    loop = StepLoop(Scheduler(config), InstantExecutor(), builder, None, False)
    rng = random.Random(0)
    for number in range(NUM_ROWS):
        prompt = array("q", [rng.randrange(10_000) for _ in range(rng.randint(100, 1024))])
        sampling = RequestSampling(SamplingParams(), number, len(prompt), frozenset())
        loop.add(Request(number, Prompt(prompt), 90_000), sampling, 0)
    for _ in range(20):
        loop.step(lambda plan, token_ids: ())
    return loop


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_decode_step(benchmark, asynchronous, block_size):
    loop = steady_loop(asynchronous, block_size)
    events = benchmark.pedantic(
        lambda: loop.step(lambda plan, token_ids: ()), rounds=400, warmup_rounds=20
    )
    assert len(events.plan.decode) == NUM_ROWS
    assert events.plan.is_pure_decode
