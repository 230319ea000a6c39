"""Recorded, teacher-forced and free-running figures of one run side by side."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sim.calibration.evaluate import Fold, fold_json
from sim.cost.profile import Profile
from sim.validation.outcome import LATENCIES, LOADS, STATISTICS, Outcome
from sim.validation.predicted import Intervals, has_pauses
from sim.validation.recorded import RecordedRun

# Above this share of steps with requests waiting behind a full budget, latencies are queueing.
OVERLOAD_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Comparison:
    """One validated run."""

    run: RecordedRun
    profile: Profile
    held_out: bool
    teacher: Outcome
    free: Outcome
    different_decisions: int
    num_extrapolated: int
    steps: Fold
    intervals: Intervals | None

    @property
    def overload(self) -> float:
        """Share of the busy time in which requests waited for admission."""
        return waiting_share(self.run)

    def rows(self) -> list[dict[str, Any]]:
        """One row per metric: recorded value, predictions, errors in percent, interval."""
        recorded = self.run.outcome.metrics()
        teacher, free = self.teacher.metrics(), self.free.metrics()
        rows = []
        for label, key in metric_keys():
            row: dict[str, Any] = {"metric": label, "key": key, "recorded": recorded[key]}
            for name, values in (("teacher_forced", teacher), ("free_running", free)):
                row[name] = values[key]
                row[f"{name}_error_percent"] = percent(values[key], recorded[key])
            if self.intervals is not None:
                low, high = self.intervals.bounds[key]
                row["interval_90"] = [low, high]
                row["covered"] = low <= recorded[key] <= high
                median = self.intervals.medians[key]
                row["noisy_median"] = median
                row["noisy_median_error_percent"] = percent(median, recorded[key])
            rows.append(row)
        return rows

    def to_json(self) -> dict[str, Any]:
        """Everything but the curves."""
        covered = [row["covered"] for row in self.rows() if "covered" in row]
        return {
            "run": self.run.name,
            "held_out": self.held_out,
            "profile_sources": [source["name"] for source in self.profile.sources],
            "decisions": {
                "steps": self.run.outcome.num_steps,
                "different": self.different_decisions,
            },
            "waiting_share_of_time": self.overload,
            "overloaded": self.overload > OVERLOAD_SHARE,
            "pauses_of_the_recording": has_pauses(self.run, self.profile),
            "free_running_steps": self.free.num_steps,
            "free_running_steps_outside_range": self.num_extrapolated,
            "step_times": fold_json(self.steps),
            "replicates": 0 if self.intervals is None else self.intervals.num_replicates,
            "interval_coverage": sum(covered) / len(covered) if covered else None,
            "kernel": asdict(self.run.kernel),
            "metrics": self.rows(),
        }


def metric_keys() -> list[tuple[str, str]]:
    """Labels and keys of all compared figures."""
    keys = list(LOADS)
    for label, name in LATENCIES:
        keys += [
            (f"{label} {short}, ms", f"{statistic}_{name}_ms") for short, statistic in STATISTICS
        ]
    return keys


def percent(predicted: float, recorded: float) -> float:
    """Relative error in percent."""
    return 100 * (predicted / recorded - 1) if recorded else 0.0


def waiting_share(run: RecordedRun) -> float:
    """Share of the steps' time in which a request waited because the step was full."""
    waited = total = 0.0
    for step, duration in zip(run.waiting, run.samples.duration_ns.tolist(), strict=True):
        total += duration
        waited += duration if step else 0.0
    return waited / total
