"""Errors of a fit on a log."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.calibration.matrices import host_matrix, step_matrix
from sim.calibration.samples import Samples
from sim.cost.terms import KINDS, Graphs, kind_of
from sim.cost.work import Floats

# Host time beyond the predicted one by so much is a pause of the recording process.
LEAST_PAUSE_NS = 20e6


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
    """A log and its errors under the model that was fitted to all others.

    `errors` are of predictions from the plan of a step alone; `ahead` of those that were also told
    the recorded times of all steps before it.
    """

    name: str
    fit: Fit
    errors: dict[str, StepError]
    ahead: dict[str, StepError]
    gap_error: float  # predicted minus recorded host time, pauses left out, % of the busy time
    relative: Floats  # recorded / predicted - 1 of each step


def predict(samples: Samples, fit: Fit, graphs: Graphs) -> tuple[Floats, Floats]:
    """Predicted durations and gaps, in ns."""
    return step_matrix(samples, graphs) @ fit.step_ns, host_matrix(samples) @ fit.host_ns


def kinds(samples: Samples, graphs: Graphs) -> NDArray[np.int64]:
    """Index into `KINDS` of each step."""
    tokens = samples.column("num_decodes") + samples.column("chunk_tokens")
    pairs = zip(tokens.tolist(), samples.is_mixed.tolist(), strict=True)
    return np.array([kind_of(graphs, int(count), mixed) for count, mixed in pairs], dtype=np.int64)


def step_error(predicted: Floats, recorded: Floats) -> StepError:
    """Errors of these steps."""
    relative = predicted / recorded - 1
    return StepError(
        len(recorded),
        100 * float(np.abs(relative).mean()),
        100 * float(relative.mean()),
        100 * float(predicted.sum() / recorded.sum() - 1),
    )


def evaluate(samples: Samples, fit: Fit, graphs: Graphs, ahead: Floats | None = None) -> Fold:
    """Errors of a fit on one log; `ahead` are durations predicted one step ahead."""
    durations, gaps = predict(samples, fit, graphs)
    kind = kinds(samples, graphs)
    known = samples.gap_ns - gaps < LEAST_PAUSE_NS
    busy = (samples.duration_ns + samples.gap_ns)[known].sum()
    gap_error = 100 * float((gaps - samples.gap_ns)[known].sum() / busy) if known.any() else 0.0
    return Fold(
        name=samples.name,
        fit=fit,
        errors=_errors_by_kind(durations, samples.duration_ns, kind),
        ahead={} if ahead is None else _errors_by_kind(ahead, samples.duration_ns, kind),
        gap_error=gap_error,
        relative=samples.duration_ns / durations - 1,
    )


def _errors_by_kind(
    predicted: Floats, recorded: Floats, kind: NDArray[np.int64]
) -> dict[str, StepError]:
    groups = {"decode": kind == 0, "mixed": kind > 0}
    groups.update({name: kind == index for index, name in enumerate(KINDS) if index})
    return {
        name: step_error(predicted[rows], recorded[rows])
        for name, rows in groups.items()
        if rows.any()
    }


def fold_json(fold: Fold) -> dict[str, Any]:
    """Held-out errors of a log, rounded for people."""
    document: dict[str, Any] = {"log": fold.name, "percent": _errors_json(fold.errors)}
    if fold.ahead:
        document["one_step_ahead_percent"] = _errors_json(fold.ahead)
    document["gap_percent_of_time"] = round(fold.gap_error, 3)
    return document


def _errors_json(errors: dict[str, StepError]) -> dict[str, dict[str, float]]:
    return {
        kind: {key: round(value, 3) for key, value in asdict(error).items()}
        for kind, error in errors.items()
    }
