"""8-bit models against HF on the same rounded numbers, and what they cost a real one.

Engine and reference differ by the order of sums, and a quotient on the border of two 8-bit floats
may then fall to either side: that moves one number by one step, which is at most 2^-3 of it. So
nearly all positions must agree as float32 does, and none may be off by more than that step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from golden.cases import ForcedSequence, random_batch, tiny_model, with_heads_of_16
from golden.forced import ForcedRunner, Observed
from golden.fp8 import (
    FORMS,
    dequantised_model,
    quantised_checkpoint,
    register_kv_attention,
    rounded_inputs,
    share_of_close_positions,
)
from golden.models import engine_options
from golden.parts import saved_tiny_model
from golden.quantised_text import score_text
from golden.reference import attention_of, hf_logits, load_hf
from golden.results import CaseResult, judged, run_case

GROUP = "FP8"
CLOSE = 1e-4  # of the largest logit
# Sums in another order, exponentials of another library: seen 1.2e-4.
CLOSE_ON_GPU = 1e-3
MIN_CLOSE_SHARE = 0.9
ONE_STEP = 2**-3
BLOCK = (16, 16)
LENGTHS = (1, 15, 33, 100)
MODELS = ("qwen3-gqa-tied", "qwen3-moe", "mixtral", "qwen2-moe-shared")
ALL_FORMS = (*FORMS, "on-load", "kv", "block+kv")
# Of the real model; docs/numerics.md says what was measured.
MAX_PERPLEXITY_RATIO, MIN_AGREEMENT = 1.04, 0.85


@dataclass(frozen=True, slots=True)
class Quantised:
    """A folder to run, the options to run it with, and HF with the same numbers."""

    folder: Path
    options: dict[str, object]
    model: nn.Module
    group: int | None  # columns of an activation that share a scale
    has_rounded_inputs: bool = True

    def truth(self, tokens: tuple[int, ...]) -> Tensor:
        """HF's logits, inputs and KV rounded as the options say."""
        inputs = rounded_inputs(self.model, self.group)
        kv = attention_of(self.model, register_kv_attention())
        with (
            inputs if self.has_rounded_inputs else nullcontext(),
            kv if "kv_cache_dtype" in self.options else nullcontext(),
        ):
            return hf_logits(self.model, tokens)


def quantised(name: str, form: str, scratch: Path, device: str = "cpu") -> Quantised:
    """`form` is one of FORMS, on-load or kv, and may end in +kv."""
    model_case = tiny_model(name) if device == "cpu" else with_heads_of_16(tiny_model(name))
    _, folder = saved_tiny_model(model_case, scratch)
    kv: dict[str, object] = {"kv_cache_dtype": "fp8"} if form.endswith("kv") else {}
    form = form.removesuffix("+kv")
    if form == "kv":
        return Quantised(folder, kv, load_hf(folder, torch.float32), None, False)
    stored_form = "channel" if form == "on-load" else form
    stored = scratch / f"{name}-{stored_form}"
    if not stored.exists():
        quantised_checkpoint(folder, stored, stored_form, BLOCK)
    model = dequantised_model(stored, scratch, BLOCK)
    if form == "on-load":
        return Quantised(folder, {"quantization": "fp8", **kv}, model, None)
    return Quantised(stored, kv, model, BLOCK[1] if form == "block" else None)


def closeness_problems(
    found: Sequence[Tensor], truth: Sequence[Tensor], close: float = CLOSE
) -> tuple[list[str], dict[str, float]]:
    """What the rule of this file objects to, and what was measured."""
    share, worst = share_of_close_positions(found, truth, close)
    problems = []
    if share < MIN_CLOSE_SHARE:
        problems.append(f"only {share:.3f} of positions are within {close:g}")
    if not worst <= ONE_STEP:
        problems.append(f"a position is off by {worst:.3g} of its largest logit")
    return problems, {"close_share": share, "worst": worst}


def run_quantised(
    case: Quantised, sequences: Sequence[ForcedSequence], device: str = "cpu", **changes: object
) -> dict[str, tuple[Observed, Tensor]]:
    """What the engine computed, and its logits, by sequence."""
    options = engine_options(case.folder, torch.float32, device, **{**case.options, **changes})
    with ForcedRunner(options, device=device) as runner:
        observed = runner.run(sequences)
        return {n: (item, runner.logits(item.hidden()).cpu()) for n, item in observed.items()}


def fp8_results(
    scratch: Path, device: str = "cpu", forms: Sequence[str] = ALL_FORMS, **changes: object
) -> Iterator[CaseResult]:
    """Every model in every form; the truth is computed on the CPU, in float32."""
    sequences = random_batch(151, LENGTHS, 14)
    close = CLOSE if device == "cpu" else CLOSE_ON_GPU
    for name in MODELS:
        for form in forms:
            yield from run_case(
                GROUP,
                f"{name}, {form}",
                partial(_judge, name, form, scratch, sequences, close, device, changes),
            )


def _judge(
    name: str,
    form: str,
    scratch: Path,
    sequences: Sequence[ForcedSequence],
    close: float,
    device: str,
    changes: dict[str, object],
) -> Iterator[CaseResult]:
    case = quantised(name, form, scratch, device)
    found = run_quantised(case, sequences, device, **changes)
    truth = [case.truth(item.sequence.tokens)[item.positions] for item, _ in found.values()]
    logits = [logits for _, logits in found.values()]
    problems, measured = closeness_problems(logits, truth, close)
    yield judged(GROUP, f"{name}, {form}", problems, **measured)


def real_text_result(folder: Path, device: str) -> CaseResult:
    """A real model in bfloat16 with and without 8-bit weights and KV, on the fixed text."""
    plain = score_text(folder, torch.bfloat16, device)
    both = score_text(folder, torch.bfloat16, device, quantization="fp8", kv_cache_dtype="fp8")
    ratio, agreement = both.perplexity / plain.perplexity, both.agreement(plain)
    problems = []
    if not ratio <= MAX_PERPLEXITY_RATIO:
        problems.append(f"perplexity is {ratio:.3f} times bfloat16's")
    if agreement < MIN_AGREEMENT:
        problems.append(f"only {agreement:.3f} of the most likely tokens are bfloat16's")
    return judged(
        GROUP,
        "perplexity of the fixed text",
        problems,
        perplexity=both.perplexity,
        plain_perplexity=plain.perplexity,
        agreement=agreement,
    )
