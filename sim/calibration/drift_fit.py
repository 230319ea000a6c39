"""How the launches of a run drift: correlation of their deviations over time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.calibration.host_fit import prompt_launch_rows
from sim.calibration.pipeline_fit import PipelineFit, launch_ns
from sim.calibration.pipeline_samples import PipelineSamples
from sim.cost.pipeline_profile import Drift

# Correlations are compared at these distances in time.
_EDGES_S = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0, 2.0, 4.0])
_MEMORIES_MS = (100, 200, 300, 500, 700, 1000, 1400, 2000, 3000)
_SHARES = tuple(step / 20 for step in range(21))
MIN_LAUNCHES = 50
# Launches that vary by less than 1 % do not drift.
LEAST_VARIANCE = 1e-4


def fit_drift(logs: Sequence[PipelineSamples], fit: PipelineFit) -> Drift:
    """Share and memory of the slow part of the launches' deviations; no drift for few launches."""
    products, counts, total = np.zeros(len(_EDGES_S) - 1), np.zeros(len(_EDGES_S) - 1), []
    for log in logs:
        rows = np.flatnonzero(prompt_launch_rows(log))
        if len(rows) < MIN_LAUNCHES:
            continue
        errors = np.log(log.waits[rows] / launch_ns(log, fit.host)[rows])
        errors -= errors.mean()
        total.append(float(errors.var()))
        first, second = np.triu_indices(len(rows), 1)
        apart = (log.begins[rows][second] - log.begins[rows][first]) / 1e9
        bins = np.digitize(apart, _EDGES_S) - 1
        known = (bins >= 0) & (bins < len(counts))
        np.add.at(products, bins[known], (errors[first] * errors[second])[known])
        np.add.at(counts, bins[known], 1)
    if not total or np.mean(total) < LEAST_VARIANCE:
        return Drift(1000.0, 0.0)
    correlation = products / np.maximum(counts, 1) / np.mean(total)
    middles = np.sqrt(_EDGES_S[1:] * _EDGES_S[:-1])
    weights = np.sqrt(counts)
    candidates = [
        (float((weights * (share * np.exp(-middles * 1e3 / memory) - correlation) ** 2).sum()),
         float(memory), share)
        for memory in _MEMORIES_MS
        for share in _SHARES
    ]  # fmt: skip
    _, memory, share = min(candidates)
    return Drift(memory, share)
