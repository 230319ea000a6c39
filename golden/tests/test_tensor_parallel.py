"""Shards reassemble to the full weights, and ranks together compute what one computes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from golden.cases import random_batch, tiny_model
from golden.forced import ForcedRunner
from golden.models import Reference, engine_options, full_reference
from golden.parts import saved_tiny_model
from golden.ranks import RankFailed, RankJob, RankReport, run_ranks
from golden.reference import load_hf
from golden.smollm2 import real_sequences
from golden.tensor_parallel import (
    full_weights,
    judge_against_hf,
    judge_against_one_rank,
    judge_ranks,
    load_shards,
    shard_result,
)

MODEL = "qwen3-gqa-tied"
SPARSE = ("qwen3-moe", "qwen2-moe-shared", "mixtral")
SHARDED = ("qwen3-gqa-tied", "qwen3-untied-bias-yarn", "llama-all-bias", "qwen2-tied-mha")


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", SHARDED)
def test_shards_reassemble_to_the_full_weights(name: str, size: int, scratch: Path) -> None:
    _, folder = saved_tiny_model(tiny_model(name), scratch)
    result = shard_result(name, load_shards(folder, size), full_weights(folder))
    assert result.status == "pass", result.detail
    if size == 8 and name == MODEL:
        assert result.measured["num_replicated_parts"] == 4  # K and V of two layers


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["columns", "experts"])
@pytest.mark.parametrize("name", SPARSE)
def test_shards_of_experts_reassemble(name: str, expert_parallel: bool, scratch: Path) -> None:
    _, folder = saved_tiny_model(tiny_model(name), scratch)
    for size in (2, 4):
        models = load_shards(folder, size, expert_parallel)
        result = shard_result(name, models, full_weights(folder))
        assert result.status == "pass", result.detail


@pytest.mark.parametrize("name", SPARSE)
def test_ranks_share_the_experts_columns_or_the_experts(name: str, scratch: Path) -> None:
    model, folder = saved_tiny_model(tiny_model(name), scratch)
    sequences = random_batch(151, (1, 15, 33), 14)
    reference = full_reference(model, sequences, (torch.float32,))
    jobs = [
        RankJob(
            engine_options(
                folder, torch.float32, "cpu", tensor_parallel_size=2, expert_parallel=by_expert
            ),
            tuple(sequences),
        )
        for by_expert in (False, True)
    ]
    for reports in run_ranks(jobs, 2):
        check_ranks(reports, reference, folder)


def test_swapped_shards_are_noticed(scratch: Path) -> None:
    _, folder = saved_tiny_model(tiny_model(MODEL), scratch)
    models = load_shards(folder, 2)
    first, second = (m.get_parameter("layers.0.mlp.gate_up.weight") for m in models)
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)
    result = shard_result(MODEL, models, full_weights(folder))
    assert result.status == "fail"
    assert "gate_proj" in result.detail


@pytest.fixture(scope="module")
def tiny(scratch: Path) -> tuple[Reference, Path]:
    model, folder = saved_tiny_model(tiny_model(MODEL), scratch)
    sequences = random_batch(151, (1, 15, 16, 17, 33, 100), 14)
    return full_reference(model, sequences, (torch.float32,)), folder


def check_ranks(reports: list[RankReport], reference: Reference, folder: Path) -> None:
    """Ranks agree among themselves, with HF and with one rank."""
    with ForcedRunner(engine_options(folder, torch.float32, "cpu")) as runner:
        single = runner.run(reference.sequences)
        results = [
            judge_ranks("ranks agree", reports),
            judge_against_hf("against HF", reports[0], reference, torch.float32),
            judge_against_one_rank("against one rank", reports[0], runner, single),
        ]
    assert [result.detail for result in results] == ["", "", ""]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_compute_what_one_computes_and_a_swapped_shard_is_noticed(
    size: int, tiny: tuple[Reference, Path]
) -> None:
    reference, folder = tiny
    options = engine_options(folder, torch.float32, "cpu", tensor_parallel_size=size)
    job = RankJob(options, tuple(reference.sequences))
    good, bad = run_ranks([job, RankJob(options, job.sequences, "swap_shards")], size)
    check_ranks(good, reference, folder)
    assert judge_against_hf("swapped", bad[0], reference, torch.float32).status == "fail"


@pytest.mark.timeout(900)
def test_three_ranks_compute_the_real_model(smollm2_folder: Path) -> None:
    sequences = real_sequences(smollm2_folder, long_tokens=0)[:2]
    reference = Reference(sequences)
    reference.add_truth(load_hf(smollm2_folder, torch.float32))
    options = engine_options(
        smollm2_folder, torch.float32, "cpu", tensor_parallel_size=3, max_model_len=512
    )
    (reports,) = run_ranks([RankJob(options, tuple(sequences))], 3, timeout_s=240)
    check_ranks(reports, reference, smollm2_folder)


def test_a_rank_that_dies_ends_the_run_and_does_not_hang_it(tiny: tuple[Reference, Path]) -> None:
    reference, folder = tiny
    options = engine_options(folder, torch.float32, "cpu", tensor_parallel_size=2)
    job = RankJob(options, tuple(reference.sequences), "die_in_a_step")
    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank \d"):
        run_ranks([job], 2, timeout_s=100)
    assert time.monotonic() - started < 90
