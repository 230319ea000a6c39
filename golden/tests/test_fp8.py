"""8-bit weights and KV: the engine computes what HF does from the same rounded numbers.

The two differ by the order of sums, and a quotient on the border of two 8-bit floats may then fall
to either side: that moves one number by one step, which is at most 2^-3 of it. So nearly all
positions must agree as float32 does, and none may be off by more than that step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from golden.cases import ForcedSequence, random_batch, tiny_model
from golden.forced import ForcedRunner, Observed
from golden.fp8 import (
    FORMS,
    dequantised_model,
    quantised_checkpoint,
    register_kv_attention,
    rounded_inputs,
    share_of_close_positions,
)
from golden.invariance import Matrix, cells, make_workload
from golden.models import Reference, engine_options
from golden.parts import saved_tiny_model
from golden.quantised_text import score_text
from golden.ranks import RankJob, run_ranks
from golden.reference import attention_of, hf_logits, load_hf

CLOSE = 1e-4  # of the largest logit
MIN_CLOSE_SHARE = 0.9
ONE_STEP = 2**-3
BLOCK = (16, 16)
LENGTHS = (1, 15, 33, 100)
CELLS = list(cells({"torch": (16,)}, policies=("mixed",)))


@dataclass(frozen=True)
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


def quantised(name: str, form: str, scratch: Path) -> Quantised:
    """`form` is one of FORMS, on-load or kv, and may end in +kv."""
    _, folder = saved_tiny_model(tiny_model(name), scratch)
    kv: dict[str, object] = {"kv_cache_dtype": "fp8"} if form.endswith("kv") else {}
    form = form.removesuffix("+kv")
    if form == "kv":
        return Quantised(folder, kv, load_hf(folder, torch.float32), None, False)
    stored = scratch / f"{name}-{'channel' if form == 'on-load' else form}"
    if not stored.exists():
        quantised_checkpoint(folder, stored, stored.name.rsplit("-", 1)[1], BLOCK)
    model = dequantised_model(stored, scratch, BLOCK)
    if form == "on-load":
        return Quantised(folder, {"quantization": "fp8", **kv}, model, None)
    return Quantised(stored, kv, model, BLOCK[1] if form == "block" else None)


def check_close(found: list[Tensor], truth: list[Tensor]) -> None:
    """The rule of this file."""
    share, worst = share_of_close_positions(found, truth, CLOSE)
    assert share >= MIN_CLOSE_SHARE
    assert worst <= ONE_STEP


def run(case: Quantised, sequences: list[ForcedSequence]) -> dict[str, tuple[Observed, Tensor]]:
    with ForcedRunner(engine_options(case.folder, torch.float32, "cpu", **case.options)) as runner:
        observed = runner.run(sequences)
        return {n: (item, runner.logits(item.hidden()).clone()) for n, item in observed.items()}


@pytest.mark.parametrize("form", [*FORMS, "on-load", "kv", "block+kv"])
@pytest.mark.parametrize("name", ["qwen3-gqa-tied", "qwen3-moe", "mixtral", "qwen2-moe-shared"])
def test_8_bit_models_follow_hf_with_the_same_numbers(name: str, form: str, scratch: Path) -> None:
    case = quantised(name, form, scratch)
    found = run(case, random_batch(151, LENGTHS, 14))
    truth = [case.truth(item.sequence.tokens)[item.positions] for item, _ in found.values()]
    check_close([logits for _, logits in found.values()], truth)


def test_the_rule_sees_a_scale_that_is_a_tenth_too_large(scratch: Path) -> None:
    case = quantised("qwen3-gqa-tied", "channel", scratch)
    options = engine_options(case.folder, torch.float32, "cpu")
    sequences = random_batch(151, (15, 33), 4)
    with ForcedRunner(options) as runner:
        with torch.no_grad():
            runner.model.get_parameter("layers.1.mlp.down.weight_scale")[5] *= 1.1
        observed = runner.run(sequences)
        found = [runner.logits(item.hidden()).clone() for item in observed.values()]
    truth = [case.truth(item.sequence.tokens)[item.positions] for item in observed.values()]
    with pytest.raises(AssertionError):
        check_close(found, truth)


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["columns", "experts"])
def test_ranks_share_8_bit_experts(expert_parallel: bool, scratch: Path) -> None:
    case = quantised("qwen3-moe", "block+kv", scratch)
    sequences = random_batch(151, (15, 33), 8)
    options = engine_options(
        case.folder,
        torch.float32,
        "cpu",
        tensor_parallel_size=2,
        expert_parallel=expert_parallel,
        **case.options,
    )
    (reports,) = run_ranks([RankJob(options, tuple(sequences))], 2)
    first = reports[0]
    assert first.logits is not None and first.positions is not None
    assert {report.logits_digest for report in reports} == {first.logits_digest}
    found = [torch.from_numpy(array) for array in first.logits.values()]
    truth = [
        case.truth(item.tokens)[first.positions[item.name]]
        for item in sorted(sequences, key=lambda s: list(first.logits or {}).index(s.name))
    ]
    check_close(found, truth)


@pytest.fixture(scope="module", params=["qwen3-gqa-tied", "qwen3-moe"])
def matrix(request: pytest.FixtureRequest, scratch: Path) -> Iterator[tuple[Matrix, Tensor]]:
    case = quantised(request.param, "channel+kv", scratch)
    workload = make_workload(151, 16)
    none = Reference(workload.all_sequences)
    made = Matrix(case.folder, none, workload, torch.float32, "cpu", **case.options)
    yield made, case.truth(workload.target.tokens)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.label)
def test_cell_serves_the_same_8_bit_numbers(cell: object, matrix: tuple[Matrix, Tensor]) -> None:
    made, truth = matrix
    logits, positions, unmet = made.target_logits(cell)  # type: ignore[arg-type]
    assert not unmet
    check_close([logits], [truth[positions]])


@pytest.mark.timeout(900)
def test_the_real_models_text_stays_about_as_likely(smollm2_folder: Path) -> None:
    """A model of 135 million parameters pays 2 to 3 % (docs/numerics.md); more would be a fault."""
    plain = score_text(smollm2_folder, torch.bfloat16, "cpu")
    both = score_text(
        smollm2_folder, torch.bfloat16, "cpu", quantization="fp8", kv_cache_dtype="fp8"
    )
    assert both.perplexity == pytest.approx(plain.perplexity, rel=0.04)
    assert both.agreement(plain) >= 0.85
