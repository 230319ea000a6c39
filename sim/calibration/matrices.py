"""The terms of a whole log at once: one row for each step, one for each gap behind it."""

from __future__ import annotations

import numpy as np

from sim.calibration.samples import Samples
from sim.cost.terms import HOST_TERMS, STEP_TERMS, Graphs, host_row, step_row
from sim.cost.work import Floats


def step_matrix(samples: Samples, graphs: Graphs) -> Floats:
    """One row of terms for each step."""
    rows = [step_row(work, graphs) for work in samples.work.tolist()]
    return np.array(rows, dtype=np.float64).reshape(-1, len(STEP_TERMS))


def host_matrix(samples: Samples) -> Floats:
    """One row of terms for the gap behind each step."""
    columns = (
        samples.column("num_sampled"),
        samples.column("chunk_tokens"),
        samples.num_finished,
        samples.num_added,
        samples.added_tokens,
    )
    rows = [host_row(*values) for values in np.column_stack(columns).tolist()]
    return np.array(rows, dtype=np.float64).reshape(-1, len(HOST_TERMS))
