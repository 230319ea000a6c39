"""Non-negative robust regression of step times, with errors on logs that were left out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.core.errors import InputError
from sim.calibration.evaluate import Fit, Fold, evaluate, kinds, predict
from sim.calibration.host_speed import host_speed, one_step_ahead, step_errors
from sim.calibration.matrices import host_matrix, step_matrix
from sim.calibration.regression import huber
from sim.calibration.samples import Samples
from sim.cost.profile import Tracking
from sim.cost.terms import KINDS, Graphs
from sim.cost.work import Floats

# Relative errors beyond this count linearly, not by their square (Huber): single steps are
# delayed tenfold by the machine. Within it the mean is fitted, since throughput rests on it.
DECODE_HUBER, MIXED_HUBER, GAP_HUBER, TRACKING_HUBER = 0.1, 0.2, 0.1, 0.1
# Mixed steps are few and long; they get this share of the weight of all decode steps.
MIXED_WEIGHT = 0.5
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
    weights = np.concatenate(_weights(logs))
    tolerance = np.where(mixed, MIXED_HUBER, DECODE_HUBER)
    step_ns = huber(terms, times, np.zeros(len(times)), weights, tolerance)
    return Fit(step_ns, _fit_host(logs))


def _weights(logs: Sequence[Samples]) -> list[Floats]:
    """Weights of the steps of each log.

    Runs differ from one another by more than the mean of their steps is uncertain by, so the weight
    of a run grows with the square root of its number of steps only.
    """
    found = [np.ones(len(log)) for log in logs]
    totals = []
    for is_mixed in (False, True):
        rows = [log.is_mixed == is_mixed for log in logs]
        for weights, chosen in zip(found, rows, strict=True):
            weights[chosen] = max(1, chosen.sum()) ** -0.25
        total = sum(
            float((one[chosen] ** 2).sum()) for one, chosen in zip(found, rows, strict=True)
        )
        totals.append(total)
    share = MIXED_WEIGHT * np.sqrt(totals[0] / totals[1]) if all(totals) else 1.0
    for weights, log in zip(found, logs, strict=True):
        weights[log.is_mixed] *= share
    return found


def _fit_host(logs: Sequence[Samples]) -> Floats:
    """Gaps count by their share of the time from one step to the next."""
    terms = np.vstack([host_matrix(log) for log in logs])
    gaps = np.concatenate([log.gap_ns for log in logs])
    durations = np.concatenate([log.duration_ns for log in logs])
    known = np.isfinite(gaps)
    if not known.any():
        return np.zeros(terms.shape[1])
    weights, tolerance = np.ones(known.sum()), np.full(known.sum(), GAP_HUBER)
    return huber(terms[known], gaps[known], durations[known], weights, tolerance)


def fit_tracking(logs: Sequence[Samples], fit: Fit, graphs: Graphs) -> Tracking:
    """How strongly each kind of step shows the host's speed, relative to decode, and follows it."""
    kind_of = [kinds(log, graphs) for log in logs]
    predicted = [predict(log, fit, graphs)[0] for log in logs]
    errors = [step_errors(log, times) for log, times in zip(logs, predicted, strict=True)]
    kind, scatter = np.concatenate(kind_of), np.abs(np.concatenate(errors))
    each_kind = [kind == each for each in range(len(KINDS))]
    deviations = [float(scatter[rows].mean()) if rows.any() else 0.0 for rows in each_kind]
    usual = deviations[0] or max(deviations)
    shows = tuple(deviation / usual if deviation else 1.0 for deviation in deviations)
    speeds = [host_speed(error, of, shows) for error, of in zip(errors, kind_of, strict=True)]
    times, speed = np.concatenate(predicted), np.concatenate(speeds)
    late = np.concatenate([log.duration_ns for log in logs]) - times
    follows = []
    for rows in each_kind:
        weights, tolerance = np.ones(rows.sum()), np.full(rows.sum(), TRACKING_HUBER)
        term = (times * speed)[rows][:, None]
        known = rows.any() and speed[rows].any()
        follows.append(
            float(huber(term, late[rows], times[rows], weights, tolerance)[0]) if known else 0.0
        )
    return Tracking(shows, tuple(follows))


def leave_one_out(logs: Sequence[Samples], graphs: Graphs) -> list[Fold]:
    """Each log under the model that was fitted to the others; none for a single log."""
    if len(logs) < 2:
        return []
    folds = []
    for index, held_out in enumerate(logs):
        others = [log for place, log in enumerate(logs) if place != index]
        fit = fit_steps(others, graphs)
        tracking = fit_tracking(others, fit, graphs)
        ahead = one_step_ahead(held_out, fit, graphs, tracking)
        folds.append(evaluate(held_out, fit, graphs, ahead))
    return folds
