"""The engine on a CUDA device: graphs, overlap, backends, memory. Run with `pytest -m gpu`."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from llm_testing import greedy, make_prompts, tokens_of

from engine.cli import main as cli
from engine.commands.model_random import write_random_model
from engine.core import audit
from engine.core.errors import ConfigError
from engine.llm import LLM
from engine.models.presets import PRESETS
from engine.sampling_params import SamplingParams
from engine.worker.kv_cache import OutOfMemoryAtStart

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BACKENDS = {"triton": 16, "flash_attn": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "small"
    raw = {
        **PRESETS["qwen3-0.6b"],
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 512,
        "vocab_size": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    write_random_model(path, raw, std=0.05)
    return str(path)


def start(folder, backend="triton", **options):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    settings = dict(
        attention_backend=backend,
        block_size=BACKENDS[backend],
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_model_len=1024,
        kv_cache_memory_bytes=256 * 2**20,
    )
    return LLM(folder, **{**settings, **options})


PROMPTS = make_prompts(seed=4, count=8, shared=40, longest=200)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_graphs_give_the_tokens_of_eager_steps(folder, backend, asynchronous):
    # All eight are prefilled in one step and end together, so every decode batch is a captured
    # size and the matrix products, whose rounding depends on it, are the same in both runs.
    options = dict(max_num_batched_tokens=4096)
    params = [greedy(48)] * 4
    params += [SamplingParams(temperature=0.8, seed=3, max_tokens=48, ignore_eos=True)] * 4
    with start(folder, backend, enforce_eager=True, **options) as llm:
        expected = tokens_of(llm.generate(PROMPTS, params, use_tqdm=False))
    with start(folder, backend, async_scheduling=asynchronous, **options) as llm:
        assert llm.info.graph_sizes == (1, 2, 4, 8)
        assert tokens_of(llm.generate(PROMPTS, params, use_tqdm=False)) == expected


@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_every_decision_replays(folder, tmp_path, policy):
    log = tmp_path / "steps.jsonl"
    options = dict(policy=policy, async_scheduling=True, step_log=str(log))
    # A pool of 40 blocks of 16 forces preemptions.
    with start(folder, num_kvcache_blocks=40, max_model_len=512, **options) as llm:
        params = [greedy(30), greedy(60), SamplingParams(top_p=0.9, max_tokens=40, logprobs=3)] * 3
        outputs = llm.generate(PROMPTS, params[:8], use_tqdm=False)
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        audit(llm.scheduler)
    assert cli(["sim", "replay", str(log)]) == 0


def test_two_engines_share_a_device(folder):
    with start(folder) as first, start(folder) as second:
        expected = tokens_of(first.generate(PROMPTS, greedy(), use_tqdm=False))
        assert tokens_of(second.generate(PROMPTS, greedy(), use_tqdm=False)) == expected


def test_the_pool_is_sized_from_measured_memory(folder):
    with start(folder, kv_cache_memory_bytes=None, gpu_memory_utilization=0.5) as llm:
        memory = llm.info.memory_bytes
        assert memory["reserved_bytes"] <= 0.5 * memory["total_bytes"]
        assert memory["graph_bytes"] <= memory["graph_reserve_bytes"]
    with pytest.raises(OutOfMemoryAtStart, match="GiB weights"):
        start(folder, kv_cache_memory_bytes=None, gpu_memory_utilization=0.0001)


def test_closing_gives_the_memory_back(folder):
    with start(folder) as llm:  # what the libraries keep for themselves is not the engine's
        llm.generate(PROMPTS, greedy(), use_tqdm=False)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with start(folder) as llm:
        llm.generate(PROMPTS, greedy(), use_tqdm=False)
    assert torch.cuda.memory_allocated() - before < 64 * 2**20


def test_a_block_size_that_the_backend_cannot_page_is_refused(folder):
    with pytest.raises(ConfigError, match="block_size"):
        start(folder, "flash_attn", block_size=16)
