"""However a request is served, its logits and tokens are the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.core import KernelConfig, Scheduler
from golden.cases import tiny_model
from golden.forced import drive
from golden.invariance import TARGET, Cell, Matrix, cells, make_workload
from golden.models import full_reference
from golden.parts import saved_tiny_model
from golden.suite import MATRIX_SIZES

CELLS = list(cells(MATRIX_SIZES))
BASE = CELLS[0]
SPARSE_CELLS = list(cells({"torch": (16,)}, policies=("mixed",)))


@pytest.fixture(scope="module")
def matrix(scratch: Path) -> Iterator[Matrix]:
    """The matrix with its base cell in place, so that cells may run in any order."""
    case = tiny_model("qwen3-gqa-tied")
    model, folder = saved_tiny_model(case, scratch)
    workload = make_workload(case.settings["vocab_size"], max(MATRIX_SIZES["torch"]))
    reference = full_reference(model, workload.all_sequences, (torch.float32,))
    made = Matrix(folder, reference, workload, torch.float32, "cpu")
    assert made.run(BASE).measured["bitwise"] == "base"
    yield made


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.label)
def test_cell_serves_the_same_numbers(cell: Cell, matrix: Matrix) -> None:
    result = matrix.run(cell)
    assert result.status == "pass", result.detail
    assert (float(result.measured["hit_tokens"]) > 0) == cell.prefix_hit
    assert (float(result.measured["num_preemptions"]) > 0) == cell.preempted


def test_the_same_cell_again_is_bitwise_equal(matrix: Matrix) -> None:
    """The inverse test of the table: equality is seen where the arithmetic is the same."""
    assert matrix.run(BASE).measured["bitwise"] == "yes"


def test_the_policy_alone_changes_no_bit(matrix: Matrix) -> None:
    """The one cell that promises equality: the same shapes are computed in the same order."""
    other = dataclasses.replace(BASE, policy="prefill_first")
    assert matrix.run(other).measured["bitwise"] == "yes"


@pytest.fixture(scope="module", params=["qwen3-moe", "mixtral"])
def sparse_matrix(request: pytest.FixtureRequest, scratch: Path) -> Iterator[Matrix]:
    case = tiny_model(request.param)
    model, folder = saved_tiny_model(case, scratch)
    workload = make_workload(case.settings["vocab_size"], 16)
    reference = full_reference(model, workload.all_sequences, (torch.float32,))
    made = Matrix(folder, reference, workload, torch.float32, "cpu")
    made.run(SPARSE_CELLS[0])
    yield made


@pytest.mark.parametrize("cell", SPARSE_CELLS, ids=lambda cell: cell.label)
def test_cell_serves_the_same_numbers_of_mixtures(cell: Cell, sparse_matrix: Matrix) -> None:
    result = sparse_matrix.run(cell)
    assert result.status == "pass", result.detail


def test_every_condition_occurs_in_the_matrix() -> None:
    for flag in ("batched", "prefix_hit", "chunked", "preempted"):
        assert {getattr(cell, flag) for cell in CELLS} == {False, True}
    assert {cell.policy for cell in CELLS} == {"mixed", "prefill_first"}


def test_a_request_alone_is_never_preempted() -> None:
    """LAW-L2: the matrix leaves those cells out because they cannot happen."""
    target = make_workload(151).target
    blocks = -(-len(target.tokens) // 16)
    scheduler = Scheduler(KernelConfig(num_blocks=blocks, max_model_len=blocks * 16))
    events = drive(scheduler, [target], lambda plan: None)
    assert events[TARGET].num_preemptions == 0
