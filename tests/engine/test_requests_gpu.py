"""What requests are promised, on a CUDA device. Run with `pytest -m gpu`."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from llm_testing import greedy, make_prompts, tokens_of

from engine.commands.model_random import write_random_model
from engine.llm import LLM
from engine.models.presets import PRESETS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SETTINGS = dict(
    block_size=16,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    max_model_len=1024,
    kv_cache_memory_bytes=256 * 2**20,
)
RAW = {
    **PRESETS["qwen3-0.6b"],
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
PROMPTS = make_prompts(seed=4, count=8, shared=40, longest=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "small"
    write_random_model(path, RAW, std=0.05)
    return str(path)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_callers_streams_do_not_matter(folder, asynchronous):
    # Without hits, so that both runs compute the same shapes: near ties are judged alike.
    settings = {**SETTINGS, "enable_prefix_caching": False}
    with LLM(folder, async_scheduling=asynchronous, **settings) as llm:
        expected = tokens_of(llm.generate(PROMPTS, greedy(40), use_tqdm=False))
        busy = torch.randn(4096, 4096, device="cuda")
        ids = llm.add_requests(PROMPTS, greedy(40))
        outputs, streams = [], [torch.cuda.Stream() for _ in range(3)]
        while llm.has_unfinished_requests:
            with torch.cuda.stream(streams[len(outputs) % 3]):
                for _ in range(5):
                    busy = busy @ busy
                outputs += llm.step()
        outputs.sort(key=lambda output: ids.index(output.request_id))
        assert tokens_of(outputs) == expected


def test_prompt_logprobs_are_those_of_the_same_tokens_as_outputs(folder):
    with LLM(folder, **SETTINGS) as llm:
        first = llm.generate(PROMPTS, greedy(30, logprobs=0), use_tqdm=False)
        whole = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in first]
        again = llm.generate(whole, greedy(2, prompt_logprobs=1), use_tqdm=False)
    for before, after in zip(first, again, strict=True):
        for token_id, entry, found in zip(
            before.outputs[0].token_ids,
            before.outputs[0].logprobs,
            after.prompt_logprobs[len(before.prompt_token_ids) :],
            strict=True,
        ):
            assert found[token_id].logprob == pytest.approx(entry[token_id].logprob, abs=0.1)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_whose_logits_are_nan_ends_with_an_error_and_alone(folder, asynchronous):
    with LLM(folder, async_scheduling=asynchronous, **SETTINGS) as llm:
        prompts = [[5, 6, 7], [8, 2000, 9], [10, 11]]
        expected = tokens_of(llm.generate(prompts, greedy(20), use_tqdm=False))
        with torch.inference_mode():
            llm.executor.runner.model.embedding.weight[2000] = float("nan")
        outputs = llm.generate([*prompts, [2000]], greedy(20), use_tqdm=False)
        assert tokens_of(outputs) == [expected[0], [], expected[2], []]
        assert outputs[1].outputs[0].error == "the model's logits are NaN"
        assert llm.scheduler.num_free_blocks == llm.info.num_blocks


STICKY = """
import sys, torch
from engine.llm import LLM, EngineClosed
from engine.sampling_params import SamplingParams
from engine.step.loop import StepFailed
llm = LLM(sys.argv[1], max_model_len=256, kv_cache_memory_bytes=2**26, async_scheduling=True)
params = SamplingParams(max_tokens=50, ignore_eos=True)
ids = llm.add_requests([[1, 2, 3]] * 4, params)
llm.step()
torch.zeros(3, device="cuda")[torch.tensor([7], device="cuda")]  # an assertion on the device
outputs = []
try:
    while llm.has_unfinished_requests:
        outputs += llm.step()
except StepFailed as error:
    assert "CUDA" in str(error), error
    outputs += llm.step()
assert sorted(o.request_id for o in outputs) == ids, outputs
assert {o.outputs[0].finish_reason for o in outputs} == {"error"}
try:
    llm.step()
except EngineClosed:
    llm.close()
    print("closed")
"""


def test_a_sticky_device_error_ends_every_request_and_the_engine(folder):
    """In a process of its own, since nothing on the device works after it."""
    done = subprocess.run(
        [sys.executable, "-c", STICKY, folder], capture_output=True, text=True, timeout=200
    )
    assert done.stdout.split() == ["closed"], done.stderr[-2000:]
