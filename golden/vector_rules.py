"""The three-way rule on vectors that are no logits: outputs of single components."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from golden.compare import MAX_POOLED_RATIO, Rules, rounding_slack


@dataclass(frozen=True, slots=True)
class ErrorStats:
    """The three-way rule on vectors that are no logits: a component's output rows."""

    observed_c: float
    max_error: float
    pooled_ratio: float
    violations: tuple[str, ...]


def three_way(engine: Tensor, truth: Tensor, yardstick: Tensor, dtype: torch.dtype) -> ErrorStats:
    """Judges rows [n, size] as `LogitComparison` judges logits, without the token rules."""
    e, r, h = (x.detach().float().reshape(-1, x.shape[-1]) for x in (engine, truth, yardstick))
    error, hf_error = (e - r).abs(), (h - r).abs()
    slack_max, slack_mean = rounding_slack(r, dtype)
    factor = 0.0 if dtype == torch.float32 else Rules().c
    bad = (error.amax(-1) > factor * hf_error.amax(-1) + slack_max) | (
        error.mean(-1) > factor * hf_error.mean(-1) + slack_mean
    )
    bad |= ~torch.isfinite(e).all(-1)
    violations = []
    if bad.any():
        first = int(bad.nonzero()[0])
        violations.append(
            f"error above bound in {int(bad.sum())} of {len(bad)} rows, first {first}"
        )
    excess = (error.amax(-1) - slack_max) / hf_error.amax(-1).clamp(min=1e-30)
    has_yardstick = dtype != torch.float32
    pooled = float(error.mean() / hf_error.mean()) if float(hf_error.mean()) > 0 else 0.0
    if has_yardstick and pooled > MAX_POOLED_RATIO:
        violations.append(f"pooled error ratio {pooled:.2f} > {MAX_POOLED_RATIO}")
    return ErrorStats(
        observed_c=max(0.0, float(excess.max())) if has_yardstick else 0.0,
        max_error=float(error.max()),
        pooled_ratio=pooled,
        violations=tuple(violations),
    )


def worst_of(parts: Mapping[str, ErrorStats]) -> ErrorStats:
    """Several comparisons as one: the largest numbers, all violations with their names."""
    return ErrorStats(
        observed_c=max(part.observed_c for part in parts.values()),
        max_error=max(part.max_error for part in parts.values()),
        pooled_ratio=max(part.pooled_ratio for part in parts.values()),
        violations=tuple(
            f"{name}: {text}" for name, part in parts.items() for text in part.violations
        ),
    )
