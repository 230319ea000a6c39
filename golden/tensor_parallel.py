"""Tensor-parallel shards: they reassemble to the full weights and give the full model's logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.attention.select import select_backend
from engine.distributed.group import TpGroup
from engine.layers.sharding import padded_vocab_rows
from engine.models.build import build_model
from engine.models.config import load_model_config
from engine.models.decoder import Decoder
from engine.models.loader import load_weights
from engine.options import EngineOptions
from golden.compare import FP32_ATOL, FP32_RTOL, LogitComparison
from golden.forced import ForcedRunner, Observed
from golden.models import Reference, rules_for, shards_of, sliced
from golden.ranks import RankJob, RankReport, run_ranks
from golden.results import CaseResult, from_stats, judged

GROUP = "tensor parallel"


def load_shards(folder: Path, size: int, expert_parallel: bool = False) -> list[Decoder]:
    """The models of all ranks, loaded in this process; they cannot communicate, only be read."""
    config = load_model_config(folder)
    models = []
    for rank in range(size):
        backend = select_backend("torch", config.head_dim, 16, torch.float32, "cpu")
        group = TpGroup(rank, size)
        model = build_model(
            config, group, backend, torch.float32, "cpu", expert_parallel=expert_parallel
        )
        load_weights(model, folder)
        models.append(model)
    return models


def shard_result(name: str, models: Sequence[Decoder], full: dict[str, Tensor]) -> CaseResult:
    """Every tensor of the checkpoint is the union of its shards, exactly and in order."""
    problems: list[str] = []
    num_split = num_replicated = 0
    for tensor, shape, items in shards_of(models):
        weight = full[tensor]
        if tuple(weight.shape) != shape:
            problems.append(f"{tensor}: shape {shape} is not the checkpoint's")
            continue
        covered = torch.zeros(shape[items[0].dim], dtype=torch.int64)
        for rank, item in enumerate(items):
            covered[item.start : item.stop] += 1
            if not torch.equal(item.target, sliced(item, weight).to(item.target.dtype)):
                problems.append(f"{tensor}: rank {rank} holds other values")
        if [item.start for item in items] != sorted(item.start for item in items):
            problems.append(f"{tensor}: ranks hold its parts out of order")
        counts = set(covered.tolist())
        if len(counts) != 1 or 0 in counts:
            problems.append(f"{tensor}: rows are held {sorted(counts)} times")
        partial = items[0].target.shape[items[0].dim] < shape[items[0].dim]
        num_replicated += partial and counts != {1}
        num_split += counts == {1}
    problems += _vocab_padding_problems(models)
    return judged(GROUP, name, problems, num_split=num_split, num_replicated_parts=num_replicated)


def _vocab_padding_problems(models: Sequence[Decoder]) -> list[str]:
    vocab_size = models[0].config.vocab_size
    rows = padded_vocab_rows(vocab_size, len(models))
    problems = []
    if rows * len(models) < vocab_size:
        problems.append(f"{rows} rows on {len(models)} ranks do not hold {vocab_size}")
    for rank, model in enumerate(models):
        for table in (model.embedding, model.head.table):
            padding = table.weight[table.rows.size :]
            if table.weight.shape[0] != rows or bool(padding.any()):
                problems.append(f"rank {rank}: padding rows are not zero")
    return problems


def full_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, the tied head's included."""
    weights: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights.update(load_file(path))
    return weights


def rank_results(
    name: str,
    options: EngineOptions,
    reference: Reference,
    dtype: torch.dtype,
    device: str = "cpu",
    timeout_s: float = 120.0,
) -> Iterator[CaseResult]:
    """`options.tensor_parallel_size` ranks against HF, against one rank and among themselves."""
    job = RankJob(options, tuple(reference.sequences))
    (reports,) = run_ranks([job], options.tensor_parallel_size, device, timeout_s)
    yield judge_ranks(f"{name}: ranks agree", reports)
    yield judge_against_hf(f"{name}: against HF", reports[0], reference, dtype)


def judge_ranks(name: str, reports: Sequence[RankReport]) -> CaseResult:
    """All ranks end with the same block tables, device state, logits and tokens."""
    first = reports[0]
    problems = []
    for what in ("tables_digest", "device_digest", "logits_digest", "drawn"):
        differing = [
            rank
            for rank, report in enumerate(reports)
            if getattr(report, what) != getattr(first, what)
        ]
        if differing:
            problems.append(f"{what} of ranks {differing} differs from rank 0's")
    return judged(GROUP, name, problems, num_ranks=len(reports))


def judge_against_hf(
    name: str, report: RankReport, reference: Reference, dtype: torch.dtype
) -> CaseResult:
    """The three-way rule on what the ranks computed together."""
    assert report.logits is not None and report.positions is not None
    comparison = LogitComparison(dtype, rules_for(dtype))
    for sequence, array in report.logits.items():
        logits = torch.from_numpy(array)
        positions = report.positions[sequence]
        rows = torch.tensor(positions)
        # Positions that drew a token are judged by it: that tests how ranks draw together.
        drawn = [
            report.drawn[sequence].get(position, token)
            for position, token in zip(positions, logits.argmax(dim=-1).tolist(), strict=True)
        ]
        truth = reference.truth[sequence].cpu()[rows]
        yardstick = reference.yardstick(sequence, dtype, rows.to(reference.truth[sequence].device))
        comparison.add(
            sequence,
            rows,
            logits,
            truth,
            None if yardstick is None else yardstick.cpu(),
            torch.tensor(drawn),
        )
    return from_stats(GROUP, name, comparison.finish())


def judge_against_one_rank(
    name: str, report: RankReport, runner: ForcedRunner, single: dict[str, Observed]
) -> CaseResult:
    """Float32 logits within 1e-5 of one rank's, and the same greedy tokens."""
    assert report.logits is not None
    problems = []
    worst = 0.0
    for sequence, item in single.items():
        alone = runner.logits(item.hidden())
        together = torch.from_numpy(report.logits[sequence])
        difference = (alone - together).abs().amax(-1)
        allowed = FP32_ATOL + FP32_RTOL * alone.abs().amax(-1)
        worst = max(worst, float(difference.max()))
        if bool((difference > allowed).any()):
            problems.append(f"{sequence}: {float((difference / allowed).max()):.1f} x the bound")
        gaps = alone.topk(2, dim=-1).values
        clear = (gaps[:, 0] - gaps[:, 1]) > 2 * allowed
        if bool((clear & (alone.argmax(-1) != together.argmax(-1))).any()):
            problems.append(f"{sequence}: another greedy token")
    return judged(GROUP, name, problems, max_difference=worst)
