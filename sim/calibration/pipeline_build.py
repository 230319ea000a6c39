"""From asynchronous logs to a pipeline profile: fit, held-out errors, drift, provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sim.calibration.build import log_source, version
from sim.calibration.drift_fit import fit_drift
from sim.calibration.pipeline_evaluate import (
    PipelineFold,
    evaluate_pipeline,
    pipeline_fold_json,
)
from sim.calibration.pipeline_fit import PipelineFit, fit_pipeline
from sim.calibration.pipeline_free import (
    percent_errors,
    predicted_figures,
    recorded_figures,
)
from sim.calibration.pipeline_samples import PipelineSamples
from sim.cost.device_terms import DECODE_TERMS, PROMPT_TERMS
from sim.cost.pipeline_profile import PipelineProfile
from sim.cost.profile import Target
from sim.cost.terms import Graphs


@dataclass(frozen=True, slots=True)
class PipelineCalibration:
    """A profile with the errors that its report shows; held out where there are two logs."""

    profile: PipelineProfile
    folds: tuple[PipelineFold, ...]
    held_out: bool


def calibrate_pipeline(
    logs: Sequence[PipelineSamples], paths: Sequence[Path], target: Target, graphs: Graphs
) -> PipelineCalibration:
    """Fits a profile to the logs and tests it on each log with a fit to the others.

    Raises:
        InputError: too few steps.
    """
    profile = fit_profile(logs, paths, target, graphs)
    folds, free_running = [], []
    if len(logs) > 1:
        for place, held in enumerate(logs):
            kept = [other for other in range(len(logs)) if other != place]
            without = fit_profile(
                [logs[other] for other in kept], [paths[other] for other in kept], target, graphs
            )
            folds.append(evaluate_pipeline(held, _fit_of(without), graphs))
            errors = percent_errors(predicted_figures(held, without), recorded_figures(held))
            free_running.append(_free_json(held.name, errors))
    profile = replace(
        profile,
        held_out=tuple(pipeline_fold_json(fold) for fold in folds),
        run_errors=tuple(fold.busy / 100 for fold in folds),
        free_running=tuple(free_running),
    )
    shown = folds or [evaluate_pipeline(log, _fit_of(profile), graphs) for log in logs]
    return PipelineCalibration(profile, tuple(shown), bool(folds))


def fit_profile(
    logs: Sequence[PipelineSamples], paths: Sequence[Path], target: Target, graphs: Graphs
) -> PipelineProfile:
    """A profile without the errors on logs that were left out; `paths` may be empty.

    Raises:
        InputError: too few steps.
    """
    fit = fit_pipeline(logs, graphs)
    return PipelineProfile(
        target=target,
        graphs=graphs,
        decode_ns=tuple(fit.decode_ns.tolist()),
        prompt_ns=tuple(fit.prompt_ns.tolist()),
        host=fit.host,
        drift=fit_drift(logs, fit),
        limits=pipeline_limits(logs),
        sources=tuple(
            log_source(log.name, path, len(log), int(log.has_chunks.sum()), log.header.kernel)
            for log, path in zip(logs, paths, strict=False)
        ),
        held_out=(),
        lockstep_version=version(),
    )


def _fit_of(profile: PipelineProfile) -> PipelineFit:
    return PipelineFit(np.array(profile.decode_ns), np.array(profile.prompt_ns), profile.host)


def _free_json(name: str, errors: Mapping[str, float]) -> dict[str, Any]:
    """The errors that a profile keeps of a free-running simulation."""
    kept = {"ttft": "mean_ttft_ms", "tpot": "mean_tpot_ms", "throughput": "output_throughput"}
    return {"log": name, **{key: round(errors[column], 2) for key, column in kept.items()}}


def pipeline_limits(logs: Sequence[PipelineSamples]) -> dict[str, int]:
    """The largest step of each kind of work."""
    steps = [one for log in logs for one in log.features]
    return {
        "sequences": max(one.num_seqs for one in steps),
        "tokens": max(one.num_tokens for one in steps),
        "kv_tokens": max(one.decode_context_sum + one.chunk_context_sum for one in steps),
        "chunk_pairs": max(one.chunk_attention_pairs for one in steps),
    }


def pipeline_lines(result: PipelineCalibration) -> list[str]:
    """The errors and coefficients as text."""
    how = "held out" if result.held_out else "in sample (one log: nothing was held out)"
    lines = [f"errors, {how}, %: mean absolute / mean (steps)"]
    for fold in result.folds:
        cells = [
            f"{label} {error.mape:.2f} / {error.bias:+.2f} ({error.num_steps:,})"
            for label, error in (
                ("decode periods", fold.decode),
                ("device time with prompts", fold.prompt),
                ("prefill episodes", fold.episode),
            )
            if error is not None
        ]
        lines.append(f"  {fold.name}: {'; '.join(cells)}; busy time {fold.busy:+.2f}")
    profile = result.profile
    for free in result.profile.free_running:
        lines.append(
            f"  {free['log']}: free-running, mean TTFT {free['ttft']:+.1f}, mean TPOT"
            f" {free['tpot']:+.1f}, throughput {free['throughput']:+.1f}"
        )
    lines.append("coefficients, us")
    for kind, terms, values in (
        ("decode", DECODE_TERMS, profile.decode_ns),
        ("prompt", PROMPT_TERMS, profile.prompt_ns),
    ):
        for term, value in zip(terms, values, strict=True):
            name = f"{kind} {term.name}"
            lines.append(f"  {name:<24} {value / 1e3:>10.2f} per {term.unit:<12} {term.meaning}")
    return lines
