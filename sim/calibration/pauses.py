"""Pauses of the recording process: garbage collections that grow with what the recording keeps.

A recorder that appends every scheduled entry to a list makes CPython's full collections longer
and longer: they come once per so many new objects and visit every object that is kept. They are
the recording's own, so a simulation of the engine has none; validation against a recording does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.calibration.evaluate import LEAST_PAUSE_NS, Fit, kinds, predict
from sim.calibration.samples import Samples
from sim.cost.calibrated import CalibratedCost
from sim.cost.features import StepFeatures
from sim.cost.profile import Pauses
from sim.cost.terms import Graphs

# Inside a step a pause is also beyond so many mean deviations of its kind of steps.
LEAST_DEVIATIONS = 8.0


@dataclass(frozen=True, slots=True)
class FoundPauses:
    """Where a log paused: the step, the entries scheduled up to it, and for how long."""

    steps: tuple[int, ...]
    entries: tuple[int, ...]
    lengths_ns: tuple[float, ...]
    num_entries: int  # of the whole log


def find_pauses(log: Samples, fit: Fit, graphs: Graphs) -> FoundPauses:
    """Steps or gaps that took far longer than predicted."""
    durations, gaps = predict(log, fit, graphs)
    kind = kinds(log, graphs)
    excess = log.duration_ns - durations
    limit = np.full(len(log), LEAST_PAUSE_NS)
    for each in np.unique(kind):
        rows = kind == each
        deviation = np.abs(excess[rows] - np.median(excess[rows])).mean()
        limit[rows] = max(LEAST_PAUSE_NS, LEAST_DEVIATIONS * deviation)
    behind = np.nan_to_num(log.gap_ns - gaps, nan=0.0)
    length = np.where(excess > limit, excess, 0) + np.where(behind > LEAST_PAUSE_NS, behind, 0)
    steps = np.flatnonzero(length)
    entries = np.cumsum(log.column("num_decodes") + log.column("num_chunks"))
    return FoundPauses(
        tuple(steps.tolist()),
        tuple(entries[steps].astype(int).tolist()),
        tuple(length[steps].tolist()),
        int(entries[-1]),
    )


def fit_pauses(logs: Sequence[Samples], fit: Fit, graphs: Graphs) -> Pauses | None:
    """How often the logs paused, and how long for each entry that had been scheduled by then.

    None where fewer than two pauses were found.
    """
    found = [find_pauses(log, fit, graphs) for log in logs]
    count = sum(len(one.steps) for one in found)
    if count < 2:
        return None
    entries = sum(sum(one.entries) for one in found)
    return Pauses(
        every_entries=round(sum(one.num_entries for one in found) / count),
        ns_per_entry=sum(sum(one.lengths_ns) for one in found) / entries,
    )


def without_pauses(log: Samples, fit: Fit, graphs: Graphs) -> NDArray[np.bool_]:
    """Mask of the steps that no pause fell into."""
    kept = np.ones(len(log), dtype=np.bool_)
    kept[list(find_pauses(log, fit, graphs).steps)] = False
    return kept


class PausingCost:
    """A calibrated cost with the pauses of a recording process behind its steps."""

    name = "calibrated"

    def __init__(self, cost: CalibratedCost, pauses: Pauses) -> None:
        self._cost, self._pauses = cost, pauses
        self._entries = 0

    @property
    def num_extrapolated(self) -> int:
        """Steps outside the calibrated range."""
        return self._cost.num_extrapolated

    def step_time_ns(self, features: StepFeatures) -> int:
        """Duration of one step, with the host work and the pause behind it."""
        (pause_ns,) = self._pauses_ns(features.num_seqs, 1)
        return self._cost.step_time_ns(features) + pause_ns

    def decode_run_ns(
        self, num_rows: int, context_sum: int, steps: int, kv_shared_tokens: int = 0
    ) -> list[int]:
        """Durations of consecutive pure decode steps."""
        times = self._cost.decode_run_ns(num_rows, context_sum, steps, kv_shared_tokens)
        pauses = self._pauses_ns(num_rows, steps)
        return [step_ns + pause_ns for step_ns, pause_ns in zip(times, pauses, strict=True)]

    def observe(self, features: StepFeatures, steps: int) -> None:
        """Learns that a step, or that many steps of a decode run, have run."""
        self._cost.observe(features, steps)
        self._entries += features.num_seqs * steps

    def intake_ns(self, num_prompt_tokens: int) -> int:
        """Host time between steps for taking in a request."""
        return self._cost.intake_ns(num_prompt_tokens)

    def describe(self) -> dict[str, object]:
        """The cost's description."""
        return self._cost.describe()

    def _pauses_ns(self, num_seqs: int, steps: int) -> list[int]:
        """The pause behind each of the next steps; most have none."""
        every, found = self._pauses.every_entries, []
        for step in range(steps):
            before = self._entries + step * num_seqs
            after = before + num_seqs
            due = after // every > before // every
            found.append(int(after * self._pauses.ns_per_entry) if due else 0)
        return found
