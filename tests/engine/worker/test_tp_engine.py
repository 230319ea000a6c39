"""Tensor parallelism over processes and gloo: same tokens, same state, and no rank left behind."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from llm_testing import greedy, make_prompts, start, tokens_of, write_tiny_model

from engine.cli import main as cli
from engine.core.errors import ConfigError
from engine.errors import WeightError
from engine.llm import EngineClosed
from engine.sampling_params import SamplingParams
from engine.step.loop import StepFailed
from engine.worker.probe import STATE_DIGEST

PROMPTS = make_prompts(seed=3, count=6, shared=9)
PARAMS = [
    greedy(10),
    SamplingParams(temperature=0.9, seed=5, max_tokens=10, ignore_eos=True),
    greedy(10, logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.8, max_tokens=10, ignore_eos=True),
    greedy(10, min_tokens=4, stop_token_ids=[7]),
    greedy(10),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def odd_folder(tmp_path_factory):
    """A vocabulary that two ranks cannot share evenly, and one KV head for both."""
    path = tmp_path_factory.mktemp("models") / "odd"
    return write_tiny_model(path, vocab_size=261, num_attention_heads=4, num_key_value_heads=1)


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


SETTINGS = [
    dict(policy="mixed", async_scheduling=True),
    dict(policy="prefill_first", async_scheduling=False),
]


def test_two_engines_of_two_ranks_say_what_one_rank_says(folder, tmp_path):  # BUG-B29
    """Two engines in one process take turns step by step."""
    small = dict(num_kvcache_blocks=22, max_model_len=80, max_num_batched_tokens=16)
    expected = []
    for options in SETTINGS:
        with start(folder, **options, **small) as alone:
            expected.append(alone.generate(PROMPTS, PARAMS, use_tqdm=False))
    logs = [str(tmp_path / f"steps-{place}.jsonl") for place in range(2)]
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                start(folder, **options, **small, tensor_parallel_size=2, step_log=log)
            )
            for options, log in zip(SETTINGS, logs, strict=True)
        ]
        outputs = run_in_turns(engines)
        digests = [llm.executor.ask(STATE_DIGEST) for llm in engines]
        pids = [pid for llm in engines for pid in llm.executor.worker_pids]
    assert len(set(pids)) == 4
    assert not any(map(is_running, pids))
    for ours, theirs, per_rank, log in zip(outputs, expected, digests, logs, strict=True):
        assert tokens_of(ours) == tokens_of(theirs)
        assert sum(output.metrics.num_preemptions for output in ours) > 0
        assert per_rank[0] == per_rank[1]
        assert_same_logprobs(ours[2].outputs[0].logprobs, theirs[2].outputs[0].logprobs)
        assert cli(["sim", "replay", log]) == 0


def run_in_turns(engines):
    outputs = [[] for _ in engines]
    for llm in engines:
        llm.add_requests(PROMPTS, PARAMS)
    while any(llm.has_unfinished_requests for llm in engines):
        for place, llm in enumerate(engines):
            if llm.has_unfinished_requests:
                outputs[place] += llm.step()
    return [sorted(mine, key=lambda output: output.request_id) for mine in outputs]


def assert_same_logprobs(ours, theirs):
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert list(mine) == list(other)
        for token_id, item in mine.items():
            assert item.logprob == pytest.approx(other[token_id].logprob, abs=1e-4)


def assert_dies_of(llm, rank):
    """SIGKILL to a rank in mid-run ends the call, the engine and all ranks."""
    pids = llm.executor.worker_pids
    llm.add_requests(PROMPTS, greedy(80))
    for _ in range(3):
        llm.step()
    begin = time.monotonic()
    os.kill(pids[rank], signal.SIGKILL)
    with pytest.raises(StepFailed, match=f"rank {rank} ended with exit code -9"):
        while True:
            llm.step()
    assert time.monotonic() - begin < 30
    assert not any(map(is_running, pids))
    with pytest.raises(EngineClosed):
        llm.generate([[1]], greedy(), use_tqdm=False)
    llm.close()


def test_odd_shapes_split_over_two_ranks_until_the_first_is_killed(odd_folder):
    with start(odd_folder) as llm:
        expected = tokens_of(llm.generate(PROMPTS, greedy(), use_tqdm=False))
    with start(odd_folder, tensor_parallel_size=2) as llm:
        assert tokens_of(llm.generate(PROMPTS, greedy(), use_tqdm=False)) == expected
        assert_dies_of(llm, rank=0)


@pytest.mark.parametrize("vocab_size", [100, 259])
def test_three_ranks_draw_what_one_rank_draws(tmp_path, vocab_size):
    """128, 128 and 3 tokens, or 64, 36 and none: the last rank then holds padding only."""
    sizes = dict(num_attention_heads=6, num_key_value_heads=3, intermediate_size=96)
    folder = write_tiny_model(tmp_path / "model", vocab_size=vocab_size, **sizes)
    prompts = [[token % vocab_size for token in prompt] for prompt in PROMPTS]
    plain = [SamplingParams(temperature=t, max_tokens=10, ignore_eos=True) for t in (0, 0.7, 1.5)]
    every = [*PARAMS[:4], greedy(10, min_tokens=9, stop_token_ids=[7, 90]), greedy(10)]
    with start(folder) as alone, start(folder, tensor_parallel_size=3) as together:
        for params in (plain * 2, every):
            expected = alone.generate(prompts, params, use_tqdm=False)
            outputs = together.generate(prompts, params, use_tqdm=False)
            assert tokens_of(outputs) == tokens_of(expected)
        assert len(set(together.executor.ask(STATE_DIGEST))) == 1


def test_a_killed_second_rank_ends_the_call_and_leaves_nothing(folder):
    with start(folder, tensor_parallel_size=2) as llm:
        rendezvous = Path(llm.executor._folder)
        assert rendezvous.is_dir()  # NCCL needs it for as long as the ranks live
        assert_dies_of(llm, rank=1)
        assert not rendezvous.exists()


def test_a_size_that_does_not_divide_the_model_is_refused(folder):
    with pytest.raises(ConfigError, match="valid sizes"):
        start(folder, tensor_parallel_size=3)


def test_a_broken_checkpoint_ends_the_start_with_the_cause(folder, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((Path(folder) / "config.json").read_bytes())
    with pytest.raises(WeightError, match="safetensors"):
        start(str(broken), tensor_parallel_size=2)


def test_a_rank_that_raises_ends_the_call_with_its_traceback(folder):
    with start(folder, tensor_parallel_size=2) as llm:
        pids = llm.executor.worker_pids
        llm.executor._pipes[1].send_bytes(b"?")  # a message that no rank knows
        with pytest.raises(StepFailed) as caught:
            for _ in range(1000):
                llm.generate(PROMPTS, greedy(), use_tqdm=False)
        assert "rank 1: Traceback" in str(caught.value)
        assert "unknown message" in str(caught.value)
        assert not any(map(is_running, pids))
