"""Errors of a pipeline fit on a run: each clock by itself, and both together."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sim.calibration.evaluate import LEAST_PAUSE_NS, StepError, step_error
from sim.calibration.pipeline_fit import (
    PipelineFit,
    device_ns,
    launch_ns,
    prompt_device_ns,
    pure_decodes,
)
from sim.calibration.pipeline_samples import Flags, PipelineSamples
from sim.cost.host_speed import even_factors
from sim.cost.terms import Graphs
from sim.cost.work import Floats

# A period is the longer of two times, so its mean is taken over so many speeds of the host.
NUM_FACTORS = 15


@dataclass(frozen=True, slots=True)
class PipelineFold:
    """A run and its errors under a fit.

    `decode` are periods between pure decode steps, `prompt` device times of steps with prompts,
    `episode` the period before such a step and its own together, `busy` is the error of the time
    in which steps followed one another, in percent.
    """

    name: str
    decode: StepError
    prompt: StepError | None
    episode: StepError | None
    busy: float


def evaluate_pipeline(log: PipelineSamples, fit: PipelineFit, graphs: Graphs) -> PipelineFold:
    """Errors of a fit on one run, told when the host began each decision and nothing more."""
    device = device_ns(log, graphs, fit.decode_ns, fit.prompt_ns)
    rows = pure_decodes(log)
    shown, recorded = prompt_device_ns(log, graphs, fit.decode_ns, fit.host)
    results = predicted_results(log, fit, device)
    before = _isolated(log)
    spans, predicted = log.result[2:] - log.result[:-2], results[2:] - log.result[:-2]
    busy = 100 * (busy_ns(log, fit, device) / _recorded_busy_ns(log) - 1)
    return PipelineFold(
        name=log.name,
        decode=step_error(device[rows], log.periods[rows]),
        prompt=_without_pauses(device[shown], recorded),
        episode=_without_pauses(predicted[before[2:]], spans[before[2:]]),
        busy=busy,
    )


def _without_pauses(predicted: Floats, recorded: Floats) -> StepError | None:
    kept = np.abs(recorded - predicted) < LEAST_PAUSE_NS
    return step_error(predicted[kept], recorded[kept]) if kept.any() else None


def _isolated(log: PipelineSamples) -> Flags:
    """Steps with prompts between decode steps, two before and one behind."""
    chunks, flags = log.has_chunks, np.zeros(len(log), dtype=np.bool_)
    steady = log.steady
    flags[2:-1] = chunks[2:-1] & ~chunks[:-3] & ~chunks[1:-2] & ~chunks[3:]
    flags[2:-1] &= steady[1:-2] & steady[2:-1] & steady[3:]
    return flags


def predicted_results(log: PipelineSamples, fit: PipelineFit, device: Floats) -> Floats:
    """When each result comes, each clock starting from what was recorded two results before.

    Launches are spread evenly, since a period is the longer of two times.
    """
    host = fit.host
    factors = even_factors(host.launch_spread, NUM_FACTORS)
    launches = launch_ns(log, host)
    inputs = host.prepare + host.prepare_seq * log.num_seqs
    chunks, steady = log.has_chunks, log.steady
    found = np.full(len(log), np.nan)
    for step in range(2, len(log) - 1):
        if not (steady[step] and steady[step + 1] and steady[step - 1]):
            continue
        # The step before ends on the device and its result is taken after this one's launch.
        ends = log.result[step - 2] + device[step - 1]
        launched = log.decided[step] + launches[step] * (factors if chunks[step] else 1.0)
        result = np.maximum(launched, ends)
        ends = np.maximum(ends, log.decided[step] + inputs[step]) + device[step]
        if chunks[step]:
            ends = np.maximum(ends, launched)
        behind = log.decided[step + 1] - log.result[step - 1]
        # Successive launches are nearly as fast as one another.
        after = launches[step + 1] * (factors if chunks[step + 1] else 1.0)
        found[step] = np.maximum(result + behind + after, ends).mean()
    return found


def _followed(log: PipelineSamples) -> Flags:
    """Steps whose result came behind that of the step before without a pause for want of work."""
    flags = log.steady.copy()
    flags[:-1] &= log.steady[1:]
    flags[-1] = False
    return flags


def _recorded_busy_ns(log: PipelineSamples) -> float:
    return float(log.periods[_followed(log)].sum())


def busy_ns(log: PipelineSamples, fit: PipelineFit, device: Floats) -> float:
    """The time from result to result over the whole run, told its plans and nothing of its times.

    What the host does besides launching is taken as recorded.
    """
    host, followed = fit.host, _followed(log)
    factors = even_factors(host.launch_spread, NUM_FACTORS)
    launches = launch_ns(log, host)
    inputs = host.prepare + host.prepare_seq * log.num_seqs
    chunks = log.has_chunks
    zero = np.zeros(NUM_FACTORS)
    ends, launched, total = zero, zero, zero
    results = [zero, zero]
    for step in range(len(log) - 1):
        if not log.steady[step]:
            # After a pause all clocks start from the recorded decision.
            ends = zero + log.decided[step]
            launched = ends + launches[step] * (factors if chunks[step] else 1.0)
            results = [zero + log.decided[step]] * 2
            decided = ends
        ends = np.maximum(ends, decided + inputs[step]) + device[step]
        if chunks[step]:
            ends = np.maximum(ends, launched)
        # The next decision follows the result before, or after a pause this launch.
        behind = log.decided[step + 1] - (log.result[step - 1] if log.steady[step] else 0.0)
        decided = results[1] + behind if log.steady[step] else zero + log.decided[step + 1]
        launched = decided + launches[step + 1] * (factors if chunks[step + 1] else 1.0)
        result = np.maximum(launched, ends)
        if followed[step]:
            total = total + result - results[1]
        results = [results[1], result]
    return float(total.mean())


def pipeline_fold_json(fold: PipelineFold) -> dict[str, Any]:
    """Errors of a run, rounded for people."""
    document: dict[str, Any] = {"log": fold.name, "busy_percent": round(fold.busy, 3)}
    for name in ("decode", "prompt", "episode"):
        error = getattr(fold, name)
        if error is not None:
            document[name] = {key: round(value, 3) for key, value in asdict(error).items()}
    return document
