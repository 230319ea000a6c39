"""Non-negative robust regression of step times, with errors on logs that were left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from engine.core.errors import InputError
from sim.calibration.samples import Floats, Samples
from sim.calibration.terms import Graphs, host_matrix, step_matrix

# Relative errors beyond this count linearly, not by their square (Huber): single steps are
# delayed tenfold by the machine. Within it the mean is fitted, since throughput rests on it.
DECODE_HUBER, MIXED_HUBER, GAP_HUBER = 0.1, 0.3, 0.1
# Mixed steps are few and long; they get this share of the weight of all decode steps.
MIXED_WEIGHT = 0.5
ITERATIONS = 20
MIN_STEPS = 200
KINDS = ("decode", "mixed_graph", "mixed_eager")


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients in ns, aligned with `STEP_TERMS` and `HOST_TERMS`."""

    step_ns: Floats
    host_ns: Floats


@dataclass(frozen=True, slots=True)
class StepError:
    """Errors of predicted step times: mean absolute, mean, and of the total time, in percent."""

    num_steps: int
    mape: float
    bias: float
    time_bias: float


@dataclass(frozen=True, slots=True)
class Fold:
    """A log and its errors under the model that was fitted to all others."""

    name: str
    fit: Fit
    errors: dict[str, StepError]
    gap_error: float  # predicted minus recorded host time between steps, % of the busy time
    relative: Floats  # recorded / predicted - 1 of each step


def fit_steps(logs: Sequence[Samples], graphs: Graphs) -> Fit:
    """Fits all logs together.

    Raises:
        InputError: too few steps.
    """
    num_steps = sum(map(len, logs))
    if num_steps < MIN_STEPS:
        names = ", ".join(log.name for log in logs)
        raise InputError(f"{names}: {num_steps} steps are too few to calibrate on ({MIN_STEPS})")
    terms = np.vstack([step_matrix(log, graphs) for log in logs])
    times = np.concatenate([log.duration_ns for log in logs])
    mixed = np.concatenate([log.is_mixed for log in logs])
    share = np.sqrt((~mixed).sum() / max(1, mixed.sum())) if (~mixed).any() else 1.0
    weights = np.where(mixed, MIXED_WEIGHT * share, 1.0)
    tolerance = np.where(mixed, MIXED_HUBER, DECODE_HUBER)
    step_ns = _huber(terms, times, np.zeros(len(times)), weights, tolerance)
    return Fit(step_ns, _fit_host(logs))


def _fit_host(logs: Sequence[Samples]) -> Floats:
    """Gaps count by their share of the time from one step to the next."""
    terms = np.vstack([host_matrix(log) for log in logs])
    gaps = np.concatenate([log.gap_ns for log in logs])
    durations = np.concatenate([log.duration_ns for log in logs])
    known = np.isfinite(gaps)
    if not known.any():
        return np.zeros(terms.shape[1])
    weights, tolerance = np.ones(known.sum()), np.full(known.sum(), GAP_HUBER)
    return _huber(terms[known], gaps[known], durations[known], weights, tolerance)


def _huber(
    terms: Floats, target: Floats, beside: Floats, weights: Floats, tolerance: Floats
) -> Floats:
    """Non-negative coefficients under a Huber loss of relative errors.

    Errors are relative to the *predicted* value (plus `beside`): relative to the recorded one the
    mean of a skewed distribution would be missed from below.
    """
    units = np.maximum(terms.max(axis=0), 1e-12)
    scaled = terms / units
    current = weights / (target + beside)
    solution = np.zeros(terms.shape[1])
    for _ in range(ITERATIONS):
        # The triangular factor has the same solution as all the rows.
        basis, factor = np.linalg.qr(scaled * current[:, None])
        solution, _ = nnls(factor, basis.T @ (target * current), maxiter=10_000)
        predicted = scaled @ solution
        scale = np.maximum(predicted + beside, 1.0)
        error = np.maximum(np.abs(predicted - target) / scale, tolerance)
        current = weights / scale * np.sqrt(tolerance / error)
    # A term that no step had says nothing about steps that have it.
    coefficients = solution / units
    coefficients[terms.max(axis=0) == 0] = 0.0
    return coefficients


def predict(samples: Samples, fit: Fit, graphs: Graphs) -> tuple[Floats, Floats]:
    """Predicted durations and gaps, in ns."""
    return step_matrix(samples, graphs) @ fit.step_ns, host_matrix(samples) @ fit.host_ns


def kinds(samples: Samples, graphs: Graphs) -> NDArray[np.int64]:
    """Index into `KINDS` of each step."""
    mixed = samples.is_mixed
    tokens = samples.column("num_decodes") + samples.column("chunk_tokens")
    eager = np.array(
        [
            graphs.is_eager(int(count), bool(is_mixed))
            for count, is_mixed in zip(tokens, mixed, strict=True)
        ],
        dtype=bool,
    )
    return np.where(mixed, np.where(eager, 2, 1), 0)


def step_error(predicted: Floats, recorded: Floats) -> StepError:
    """Errors of these steps."""
    relative = predicted / recorded - 1
    return StepError(
        len(recorded),
        100 * float(np.abs(relative).mean()),
        100 * float(relative.mean()),
        100 * float(predicted.sum() / recorded.sum() - 1),
    )


def leave_one_out(logs: Sequence[Samples], graphs: Graphs) -> list[Fold]:
    """Each log under the model that was fitted to the others; none for a single log."""
    if len(logs) < 2:
        return []
    folds = []
    for index, held_out in enumerate(logs):
        fit = fit_steps([log for place, log in enumerate(logs) if place != index], graphs)
        folds.append(evaluate(held_out, fit, graphs))
    return folds


def evaluate(samples: Samples, fit: Fit, graphs: Graphs) -> Fold:
    """Errors of a fit on one log."""
    durations, gaps = predict(samples, fit, graphs)
    kind = kinds(samples, graphs)
    groups = {
        "decode": kind == 0,
        "mixed": kind > 0,
        "mixed_graph": kind == 1,
        "mixed_eager": kind == 2,
    }
    errors = {
        name: step_error(durations[rows], samples.duration_ns[rows])
        for name, rows in groups.items()
        if rows.any()
    }
    known = np.isfinite(samples.gap_ns)
    busy = (samples.duration_ns + samples.gap_ns)[known].sum()
    gap_error = 100 * float((gaps - samples.gap_ns)[known].sum() / busy) if known.any() else 0.0
    return Fold(samples.name, fit, errors, gap_error, samples.duration_ns / durations - 1)
