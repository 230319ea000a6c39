"""The engine's own greedy tokens and logprobs, as a user gets them, are HF's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from golden.cases import PROMPTS, random_batch, tiny_model
from golden.generation import GREEDY, generate, greedy_problems
from golden.parts import saved_tiny_model
from golden.reference import load_hf

MODEL = "qwen3-gqa-tied"
LENGTHS = (1, 15, 16, 17, 40)
WAYS: dict[str, dict[str, object]] = {
    "mixed, roomy": {},
    "mixed, chunks of 7, small blocks": {"max_num_batched_tokens": 7, "block_size": 3},
    "mixed, preempting": {"num_kvcache_blocks": 9, "max_model_len": 80, "block_size": 16},
    "prefill_first, no cache": {"policy": "prefill_first", "enable_prefix_caching": False},
    "overlapping steps": {"async_scheduling": True, "max_num_batched_tokens": 24},
    "two ranks": {"tensor_parallel_size": 2},
}


SPARSE_WAYS: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3-moe, chunks of 7": ("qwen3-moe", {"max_num_batched_tokens": 7, "block_size": 3}),
    "qwen3-moe, preempting": ("qwen3-moe", WAYS["mixed, preempting"]),
    "qwen3-moe, two ranks": ("qwen3-moe", {"tensor_parallel_size": 2}),
    "qwen3-moe, experts on two ranks": (
        "qwen3-moe",
        {"tensor_parallel_size": 2, "expert_parallel": True},
    ),
    "mixtral": ("mixtral", {}),
    "qwen2-moe-shared": ("qwen2-moe-shared", {"async_scheduling": True}),
}


@pytest.mark.parametrize("way", SPARSE_WAYS)
def test_greedy_tokens_of_mixtures_are_hfs(way: str, scratch: Path) -> None:
    name, options = SPARSE_WAYS[way]
    model, folder = saved_tiny_model(tiny_model(name), scratch)
    prompts = [item.prompt for item in random_batch(151, LENGTHS, 1)]
    outputs = generate(folder, prompts, max_num_seqs=4, **options)
    close = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        problems, too_close = greedy_problems(model, prompt, output)
        assert not problems
        close += too_close
    assert close <= 0.02 * len(prompts) * (GREEDY.max_tokens or 0)


@pytest.fixture(scope="module")
def tiny(scratch: Path) -> tuple[nn.Module, Path]:
    return saved_tiny_model(tiny_model(MODEL), scratch)


@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_and_logprobs_are_hfs(way: str, tiny: tuple[nn.Module, Path]) -> None:
    model, folder = tiny
    prompts = [item.prompt for item in random_batch(151, LENGTHS, 1)]
    outputs = generate(folder, prompts, max_num_seqs=4, **WAYS[way])
    close = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == GREEDY.max_tokens
        problems, too_close = greedy_problems(model, prompt, output)
        assert not problems
        close += too_close
    assert close <= 0.02 * len(prompts) * (GREEDY.max_tokens or 0)
    if way == "mixed, preempting":
        assert sum(output.metrics.num_preemptions for output in outputs) > 0


def test_a_wrong_token_is_noticed(tiny: tuple[nn.Module, Path]) -> None:
    model, folder = tiny
    prompt = random_batch(151, (20,), 1)[0].prompt
    (output,) = generate(folder, [prompt])
    completion = output.outputs[0]
    completion.token_ids[3] = (completion.token_ids[3] + 1) % 151  # type: ignore[index]
    assert completion.logprobs is not None
    completion.logprobs[3][completion.token_ids[3]] = next(iter(completion.logprobs[3].values()))
    problems, _ = greedy_problems(model, prompt, output)
    assert any(text.startswith("output 3: token") for text in problems)


@pytest.mark.timeout(900)
def test_the_real_models_greedy_text_is_hfs(smollm2_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder, local_files_only=True)
    model = load_hf(smollm2_folder, torch.float32)
    prompts = [
        tokenizer.encode(text) for text in ("The capital of France is", PROMPTS["code"][:200])
    ]
    outputs = generate(smollm2_folder, prompts, max_model_len=256)
    for prompt, output in zip(prompts, outputs, strict=True):
        problems, _ = greedy_problems(model, prompt, output)
        assert not problems
    assert outputs[0].outputs[0].text.startswith(" Paris")
