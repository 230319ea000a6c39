"""8-bit weights and KV: the engine computes what HF does from the same rounded numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from golden.cases import random_batch
from golden.forced import ForcedRunner
from golden.fp8_suite import (
    ALL_FORMS,
    LENGTHS,
    MODELS,
    closeness_problems,
    quantised,
    real_text_result,
    run_quantised,
)
from golden.invariance import Matrix, cells, make_workload
from golden.models import Reference, engine_options
from golden.ranks import RankJob, run_ranks

CELLS = list(cells({"torch": (16,)}, policies=("mixed",)))


def check_close(found: list[Tensor], truth: list[Tensor]) -> None:
    """The rule of the suite."""
    assert closeness_problems(found, truth)[0] == []


@pytest.mark.parametrize("form", ALL_FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_8_bit_models_follow_hf_with_the_same_numbers(name: str, form: str, scratch: Path) -> None:
    case = quantised(name, form, scratch)
    found = run_quantised(case, random_batch(151, LENGTHS, 14))
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
    result = real_text_result(smollm2_folder, "cpu")
    assert result.status == "pass", result.detail
