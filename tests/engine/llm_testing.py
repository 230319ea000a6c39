"""A tiny random Qwen3 and workloads for tests of the whole engine on a CPU."""

from __future__ import annotations

import random

from engine.commands.model_random import write_random_model
from engine.llm import LLM
from engine.models.presets import PRESETS
from engine.sampling_params import SamplingParams

VOCAB_SIZE = 259
EOS_ID = 2


def write_tiny_model(folder, **overrides):
    """A checkpoint with weights large enough that tokens differ from one another."""
    raw = {**PRESETS["tiny-qwen3"], **overrides}
    write_random_model(folder, raw, dtype="float32", std=0.3)
    return str(folder)


def start(folder, **options):
    settings = dict(
        device="cpu", block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128
    )
    return LLM(folder, **{**settings, **options})


def make_prompts(seed, count=10, shared=0, longest=40):
    """Random prompts; the first `shared` tokens are the same in every second one."""
    rng = random.Random(seed)
    head = [rng.randrange(VOCAB_SIZE) for _ in range(shared)]
    prompts = []
    for place in range(count):
        body = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, longest))]
        prompts.append(head + body if place % 2 else body)
    return prompts


def greedy(max_tokens=12, **rest):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **rest)


def tokens_of(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def one_by_one(folder, prompts, params):
    """The oracle: each request alone, in one chunk, without a prefix cache."""
    with start(folder, enable_prefix_caching=False) as llm:
        return [
            tokens_of(llm.generate([prompt], param, use_tqdm=False))[0]
            for prompt, param in zip(prompts, params, strict=True)
        ]
