"""Log probabilities of prompts are Hugging Face's, however the prompt is computed."""

from __future__ import annotations

import pytest
import torch
from llm_testing import greedy, make_prompts, start, tokens_of
from model_testing import hf_model, saved

from engine.cli import main as cli
from engine.core.errors import ConfigError
from engine.sampling_params import SamplingParams

PROMPTS = [[token % 97 for token in p] for p in make_prompts(seed=8, count=7, shared=13)]
ASKED = [3, None, 0, 2, None, 20, 1]
PARAMS = [greedy(30, prompt_logprobs=count) for count in ASKED]


@pytest.fixture(scope="module")
def model():
    return hf_model("Qwen3")


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return str(saved(model, tmp_path_factory.mktemp("models") / "hf"))


@pytest.fixture(scope="module")
def truth(model):
    """Per prompt the log probabilities [place, token] of what follows."""
    with torch.no_grad():
        return [
            model(torch.tensor([prompt])).logits[0].log_softmax(-1) if len(prompt) else None
            for prompt in PROMPTS
        ]


def check(outputs, truth):
    for output, prompt, count, expected in zip(outputs, PROMPTS, ASKED, truth, strict=True):
        found = output.prompt_logprobs
        if count is None:
            assert found is None
            continue
        assert len(found) == len(prompt)
        assert found[0] is None
        for place, entry in enumerate(found[1:], 1):
            row = expected[place - 1]
            assert prompt[place] in entry
            assert count <= len(entry) <= count + 1
            for token_id, item in entry.items():
                assert item.logprob == pytest.approx(row[token_id].item(), abs=2e-4)
            rank = entry[prompt[place]].rank
            assert rank == pytest.approx(int((row > row[prompt[place]]).sum()) + 1, abs=1)
            best = sorted(entry.values(), key=lambda item: item.rank)[:count]
            assert [item.rank for item in best] == list(range(1, count + 1))


SETTINGS = {
    "whole prompts": {},
    "chunks": dict(max_num_batched_tokens=7),
    "tiny pool": dict(num_kvcache_blocks=20, max_model_len=80, max_num_batched_tokens=9),
    "overlap": dict(async_scheduling=True, num_kvcache_blocks=20, max_model_len=80),
    "prefill first": dict(policy="prefill_first", num_kvcache_blocks=20, max_model_len=80),
    "one row": dict(max_num_seqs=1),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_they_are_those_of_hugging_face(folder, truth, settings, tmp_path):
    log = tmp_path / "steps.jsonl"
    with start(folder, step_log=str(log), **settings) as llm:
        plain = llm.generate(PROMPTS, greedy(30), use_tqdm=False)  # warms the prefix cache
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert tokens_of(outputs) == tokens_of(plain)
        check(outputs, truth)
        if "num_kvcache_blocks" in settings:
            assert sum(output.metrics.num_preemptions for output in outputs) > 0
        hits = [output.metrics.num_cached_tokens for output in outputs]
        assert all(not hit for hit, count in zip(hits, ASKED, strict=True) if count is not None)
        check(llm.generate(PROMPTS, PARAMS, use_tqdm=False), truth)
        assert llm.scheduler.num_free_blocks == llm.info.num_blocks
    assert cli(["sim", "replay", str(log)]) == 0


def test_ranks_give_the_same(folder, truth):
    with start(folder, tensor_parallel_size=2, max_num_batched_tokens=16) as llm:
        check(llm.generate(PROMPTS, PARAMS, use_tqdm=False), truth)


def test_streams_show_them_as_they_come(folder):
    with start(folder, max_num_batched_tokens=5) as llm:
        outputs = list(llm.stream([[1, 2, 3, 4, 5, 6, 7, 8]], greedy(2, prompt_logprobs=0)))
    assert all(entry is not None for entry in outputs[-1].prompt_logprobs[1:])


@pytest.mark.parametrize("value", [-1, 21, 1.0, True])
def test_impossible_numbers_are_refused(value):
    with pytest.raises(ConfigError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=value)
