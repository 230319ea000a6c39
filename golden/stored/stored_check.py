"""The engine on this machine against a reference that was made somewhere else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.core.errors import InputError
from engine.models.build import resolve_dtype
from engine.models.config import load_model_config
from engine.options import EngineOptions
from engine.worker.device import resolve_device
from golden.check.check_plan import CheckPlan, Say, engine_for
from golden.check.eight_bits import eight_bits_of
from golden.check.engine_runs import EngineRun, rank_runs, single_runs
from golden.check.run_judge import Rows
from golden.models import COMPARED_ROWS
from golden.results import CaseResult, skipped
from golden.stored.identity import check_same, identity_of
from golden.stored.reference_file import (
    StoredReference,
    StoredSequence,
    check_dtype,
    dtype_name,
)
from golden.stored.stored_rules import Seen, StoredJudge, StoredStats, said

GROUP = "reference"


@dataclass(slots=True)
class StoredOutcome:
    """Everything that a comparison with a reference found."""

    reference: StoredReference
    device: torch.device
    dtype: str
    cases: list[CaseResult] = field(default_factory=list)
    stats: dict[str, StoredStats] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data for the record."""
        return {
            "model": self.reference.about["model"],
            "dtype": self.dtype,
            "reference": {key: self.reference.about[key] for key in ("device", "versions", "top")},
            "runs": {name: asdict(stats) for name, stats in self.stats.items()},
        }


def check_stored(plan: CheckPlan, reference: StoredReference, say: Say) -> StoredOutcome:
    """Runs the engine along the reference's tokens and judges its log-probabilities.

    Raises:
        ConfigError, InputError: the reference is of something else, or cannot judge this.
    """
    options = EngineOptions.from_kwargs(plan.model, **plan.engine)
    config = load_model_config(options.model)
    dtype = dtype_name(resolve_dtype(options.dtype, config))
    _check_can_judge(reference, dtype, options)
    say("digests of the weights")
    check_same(
        reference.about["identity"],
        identity_of(Path(options.model)),
        reference.where,
        Path(options.model),
    )
    device = resolve_device(options, 0)
    outcome = StoredOutcome(reference, device, dtype)
    options = engine_for(plan, reference.forced, needs_eager=False)
    size = options.tensor_parallel_size
    say(f"engine: {size} rank(s), {dtype}, {reference.num_positions:,} positions")
    if size > 1:
        runs = rank_runs(options, reference.forced, device, plan.rank_defect, outcome.cases)
    else:
        runs = single_runs(options, reference.forced, device, plan.defect)
    for run in runs:
        _judge(run, outcome)
        say(f"  {outcome.cases[-1].status}: {run.name}")
    return outcome


def _check_can_judge(reference: StoredReference, dtype: str, options: EngineOptions) -> None:
    if eight_bits_of(options):
        raise InputError(
            "--reference has no yardstick for 8-bit matrices or KV: leave --quantization and "
            "--kv-cache-dtype, or check without --reference"
        )
    check_dtype(reference, dtype)


def _judge(run: EngineRun, outcome: StoredOutcome) -> None:
    if run.unmet:
        outcome.cases.append(skipped(GROUP, run.name, run.unmet))
        return
    judge = StoredJudge(outcome.reference, outcome.dtype)
    stored = {item.name: item for item in outcome.reference.sequences}
    for rows in run.rows:
        for seen in seen_of(rows, stored[rows.sequence.name]):
            judge.add(seen)
    stats = judge.finish()
    outcome.stats[run.name] = stats
    status = "pass" if stats.passed else "fail"
    outcome.cases.append(
        CaseResult(GROUP, run.name, status, "; ".join(stats.violations), measured=run.measured)
    )


@torch.inference_mode()
def seen_of(rows: Rows, stored: StoredSequence) -> Iterator[Seen]:
    """What an engine's logits say of a sequence; a position that was computed again comes again."""
    tops, tokens, positions = [], [], []
    drawn: dict[int, int] = {}
    for start in range(0, len(rows.positions), COMPARED_ROWS):
        part = slice(start, start + COMPARED_ROWS)
        logits = rows.logits(part)
        logprobs = said(torch.log_softmax(logits.double(), dim=-1)).cpu()
        here = torch.tensor(rows.positions[part])
        following = torch.tensor([rows.sequence.tokens[p + 1] for p in here.tolist()])
        tops.append(logprobs.gather(-1, stored.top_ids[here]))
        tokens.append(logprobs.gather(-1, following[:, None])[:, 0])
        positions.append(here)
        best = logits.argmax(-1).tolist()
        drawn |= {p: rows.drawn.get(p, t) for p, t in zip(here.tolist(), best, strict=True)}
    yield Seen(rows.sequence.name, torch.cat(positions), torch.cat(tops), torch.cat(tokens), drawn)
