"""The engine as users run it, free-running: its own greedy tokens against HF's logits for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from engine.llm import LLM
from engine.requests.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from golden.compare import FP32_ATOL, FP32_RTOL
from golden.reference import hf_logits

LOGPROB_ATOL = 1e-4
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3)


def generate(
    folder: Path, prompts: Sequence[Sequence[int]], **options: object
) -> list[RequestOutput]:
    """Greedy outputs of a float32 engine on the CPU."""
    settings: dict[str, object] = {"device": "cpu", "dtype": "float32", **options}
    with LLM(str(folder), **settings) as llm:
        return llm.generate([list(prompt) for prompt in prompts], GREEDY, use_tqdm=False)


def greedy_problems(
    model: nn.Module, prompt: Sequence[int], output: RequestOutput
) -> tuple[list[str], int]:
    """What HF in float32 objects to, and how many tokens the gap was too small to judge.

    HF reads the engine's own tokens, so one token within the gap does not end the comparison.
    """
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    logits = hf_logits(model, [*prompt, *tokens])[len(prompt) - 1 :].float()
    top = logits.topk(2, dim=-1)
    allowed = FP32_ATOL + FP32_RTOL * logits.abs().amax(-1)
    clear = (top.values[:, 0] - top.values[:, 1]) > 2 * allowed
    other = torch.tensor(tokens) != top.indices[:, 0]
    problems = [
        f"output {place}: token {tokens[place]}, HF's is {int(top.indices[place, 0])}"
        for place in (clear & other).nonzero()[:, 0].tolist()
    ]
    expected = torch.log_softmax(logits.double(), dim=-1)
    assert completion.logprobs is not None
    for place, (token, found) in enumerate(zip(tokens, completion.logprobs, strict=True)):
        difference = abs(found[token].logprob - float(expected[place, token]))
        if difference > LOGPROB_ATOL:
            problems.append(f"output {place}: logprob off by {difference:.2g}")
    return problems, int((~clear).sum())
