"""Non-negative robust regression of step times, with errors on logs that were left out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from engine.core.errors import InputError
from sim.calibration.evaluate import Fit, Fold, evaluate
from sim.calibration.samples import Floats, Samples
from sim.calibration.terms import Graphs, host_matrix, step_matrix

# Relative errors beyond this count linearly, not by their square (Huber): single steps are
# delayed tenfold by the machine. Within it the mean is fitted, since throughput rests on it.
DECODE_HUBER, MIXED_HUBER, GAP_HUBER = 0.1, 0.3, 0.1
# Mixed steps are few and long; they get this share of the weight of all decode steps.
MIXED_WEIGHT = 0.5
ITERATIONS = 20
MIN_STEPS = 200


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
        solution = _nnls(scaled * current[:, None], target * current)
        predicted = scaled @ solution
        scale = np.maximum(predicted + beside, 1.0)
        error = np.maximum(np.abs(predicted - target) / scale, tolerance)
        current = weights / scale * np.sqrt(tolerance / error)
    # A term that no step had says nothing about steps that have it.
    coefficients: Floats = solution / units
    coefficients[terms.max(axis=0) == 0] = 0.0
    return coefficients


def _nnls(terms: Floats, target: Floats) -> Floats:
    """Non-negative least squares of many rows, on a square root of the normal matrix."""
    values, vectors = np.linalg.eigh(terms.T @ terms)
    kept = values > values[-1] * 1e-13
    roots = np.sqrt(values[kept])
    factor = roots[:, None] * vectors[:, kept].T
    reduced = vectors[:, kept].T @ (terms.T @ target) / roots
    solution: Floats = nnls(factor, reduced, maxiter=10_000)[0]
    return solution


def leave_one_out(logs: Sequence[Samples], graphs: Graphs) -> list[Fold]:
    """Each log under the model that was fitted to the others; none for a single log."""
    if len(logs) < 2:
        return []
    folds = []
    for index, held_out in enumerate(logs):
        fit = fit_steps([log for place, log in enumerate(logs) if place != index], graphs)
        folds.append(evaluate(held_out, fit, graphs))
    return folds
