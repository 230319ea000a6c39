"""Host time of the engine's steps, with a device that answers at once.

    python -m pytest benchmarks/test_engine_host.py

What is timed is all that the host does in a decode step of 256 rows besides the launch itself:
schedule, build the command, commit, follow the requests.
"""

import random
from array import array

import pytest

from engine.core import KernelConfig, Scheduler
from engine.requests.live import LiveRequest
from engine.requests.prompts import TokenPrompt
from engine.requests.registry import RequestRegistry
from engine.sampling_params import RequestSampling, SamplingParams
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
    loop = StepLoop(Scheduler(config), InstantExecutor(), RequestRegistry())
    rng = random.Random(0)
    for number in range(NUM_ROWS):
        prompt = array("q", [rng.randrange(10_000) for _ in range(rng.randint(100, 1024))])
        params = SamplingParams(max_tokens=90_000)
        sampling = RequestSampling(params, number, len(prompt), frozenset())
        live = LiveRequest(number, TokenPrompt(prompt), sampling, 0, None)
        loop.add(live, live.kernel_request(config.max_model_len))
    for _ in range(20):
        loop.step()
    return loop


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_decode_step(benchmark, asynchronous, block_size):
    loop = steady_loop(asynchronous, block_size)
    step = benchmark.pedantic(loop.step, rounds=400, warmup_rounds=20)
    assert len(step.plan.decode) == NUM_ROWS
    assert step.plan.is_pure_decode
