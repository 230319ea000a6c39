"""Non-negative robust regression with errors relative to the predicted value."""

from __future__ import annotations

import numpy as np

from sim.cost.work import Floats

ITERATIONS = 20


def huber(
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
    # Only fitting needs scipy: an extra that the help of a verb must not ask for.

    # Fitting needs scipy, predicting does not.
    from scipy.optimize import nnls

    values, vectors = np.linalg.eigh(terms.T @ terms)
    kept = values > values[-1] * 1e-13
    roots = np.sqrt(values[kept])
    factor = roots[:, None] * vectors[:, kept].T
    reduced = vectors[:, kept].T @ (terms.T @ target) / roots
    solution: Floats = nnls(factor, reduced, maxiter=10_000)[0]
    return solution
