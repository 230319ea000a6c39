"""One step ahead: how far a run's own past explains the scatter of its next step.

The host's speed drifts within a run, by up to a factor of two, and nothing in the plan of a step
says how fast it is. The steps before it do: this follows the speed with an exponential mean of
their errors. It needs recorded times, so it tells what a prediction of step times from the plan
alone cannot reach; a simulation has no past of a real host to follow.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.calibration.evaluate import Fit, kinds, predict
from sim.calibration.samples import Samples
from sim.cost.profile import Tracking
from sim.cost.terms import Graphs
from sim.cost.work import Floats

# Share of the newest step in the mean of the errors, and the largest error that counts.
NEWEST_SHARE, LARGEST_ERROR = 0.3, 0.3


def one_step_ahead(log: Samples, fit: Fit, graphs: Graphs, tracking: Tracking) -> Floats:
    """Predicted durations in ns, each told the recorded times of all steps before it."""
    predicted, kind = predict(log, fit, graphs)[0], kinds(log, graphs)
    speed = host_speed(step_errors(log, predicted), kind, tracking.shows)
    ahead: Floats = predicted * (1 + np.array(tracking.follows)[kind] * speed)
    return ahead


def host_speed(errors: Floats, kind: np.ndarray, shows: Sequence[float]) -> Floats:
    """Before each step: the mean of the errors up to it, in units of a decode step's."""
    speed, before = 0.0, []
    for error, each in zip(errors.tolist(), kind.tolist(), strict=True):
        before.append(speed)
        speed += NEWEST_SHARE * (error / shows[each] - speed)
    return np.array(before)


def step_errors(log: Samples, predicted: Floats) -> Floats:
    """Relative errors of predictions; large ones are stalls and say little about the speed."""
    return np.clip(log.duration_ns / predicted - 1, -LARGEST_ERROR, LARGEST_ERROR)
