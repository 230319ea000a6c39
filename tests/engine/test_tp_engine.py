"""Tensor parallelism over processes and gloo: same tokens, same state, and no rank left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from llm_testing import greedy, make_prompts, start, tokens_of, write_tiny_model

from engine.cli import main as cli
from engine.core.errors import ConfigError
from engine.llm import EngineClosed
from engine.models.errors import WeightError
from engine.rank_probe import STATE_DIGEST
from engine.sampling import SamplingParams
from engine.step_loop import StepFailed

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


@pytest.mark.parametrize(("policy", "asynchronous"), [("mixed", True), ("prefill_first", False)])
def test_two_ranks_say_what_one_says(folder, tmp_path, policy, asynchronous):
    log = tmp_path / "steps.jsonl"
    options = dict(
        policy=policy,
        async_scheduling=asynchronous,
        num_kvcache_blocks=22,
        max_model_len=80,
        max_num_batched_tokens=16,
    )
    with start(folder, **options) as llm:
        expected = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    with start(folder, **options, tensor_parallel_size=2, step_log=str(log)) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        digests = llm.executor.ask(STATE_DIGEST)
        pids = llm.executor.worker_pids
    assert tokens_of(outputs) == tokens_of(expected)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert digests[0] == digests[1]
    for ours, theirs in zip(outputs[2].outputs[0].logprobs, expected[2].outputs[0].logprobs):  # noqa: B905
        assert list(ours) == list(theirs)
        for token_id, item in ours.items():
            assert item.logprob == pytest.approx(theirs[token_id].logprob, abs=1e-4)
    assert not any(map(is_running, pids))
    assert cli(["sim", "replay", str(log)]) == 0


def test_odd_shapes_split_over_two_ranks(odd_folder):
    with start(odd_folder) as llm:
        expected = tokens_of(llm.generate(PROMPTS, greedy(), use_tqdm=False))
    with start(odd_folder, tensor_parallel_size=2) as llm:
        assert tokens_of(llm.generate(PROMPTS, greedy(), use_tqdm=False)) == expected


def test_a_size_that_does_not_divide_the_model_is_refused(folder):
    with pytest.raises(ConfigError, match="valid sizes"):
        start(folder, tensor_parallel_size=3)


def test_a_broken_checkpoint_ends_the_start_with_the_cause(folder, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((Path(folder) / "config.json").read_bytes())
    with pytest.raises(WeightError, match="safetensors"):
        start(str(broken), tensor_parallel_size=2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_call_and_leaves_nothing(folder, rank):
    with start(folder, tensor_parallel_size=2) as llm:
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


def test_two_engines_with_ranks_live_in_one_process(folder):  # B29
    with start(folder) as alone:
        expected = tokens_of(alone.generate(PROMPTS, greedy(4), use_tqdm=False))
    with (
        start(folder, tensor_parallel_size=2) as first,
        start(folder, tensor_parallel_size=2) as second,
    ):
        first.add_requests(PROMPTS, greedy(4))
        assert tokens_of(second.generate(PROMPTS, greedy(4), use_tqdm=False)) == expected
        outputs = []
        while first.has_unfinished_requests:
            outputs += first.step()
        outputs.sort(key=lambda output: output.request_id)
        assert tokens_of(outputs) == expected
