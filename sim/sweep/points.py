"""The points of a sweep: figures of each seed's run, and their means with intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sim.metrics.run_summary import RunSummary
from sim.planning.student import student_quantile
from sim.sweep.grid import Axis, Setting

CONFIDENCE = 0.9
# Keys of summary.json that a sweep keeps; those of `sim` have their place in it.
_TOP = (
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    "request_goodput",
    "mean_ttft_ms",
    "p50_ttft_ms",
    "p90_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p50_tpot_ms",
    "p90_tpot_ms",
    "p99_tpot_ms",
    "p99_itl_ms",
    "mean_e2el_ms",
    "p99_e2el_ms",
)
_SIM = ("mean_kv_utilisation", "prefix_hit_rate", "num_preemptions", "mfu", "mbu")
FIGURES = (*_TOP, *_SIM)


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run: its figures, None where a run has none; `error` if it failed."""

    seed: int
    figures: Mapping[str, float | None] = field(default_factory=dict)
    stable: bool = True
    rejected: int = 0
    extrapolated: int = 0
    error: str | None = None
    crashed: bool = False


def figures_of(summary: RunSummary, seed: int) -> RunFigures:
    """What a sweep keeps of a run."""
    document = summary.to_json()
    inner = summary.sim.to_json()
    figures = {name: _number(document.get(name)) for name in _TOP}
    figures.update({name: _number(inner.get(name)) for name in _SIM})
    sim = summary.sim
    return RunFigures(seed, figures, sim.stable, sim.requests.rejected, sim.num_extrapolated_steps)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds; `low` and `high` are None with one seed."""

    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One setting and its runs, in the order of the seeds."""

    setting: Setting
    runs: Sequence[RunFigures]

    @property
    def error(self) -> str | None:
        """Why it has no figures, if a run failed."""
        return next((run.error for run in self.runs if run.error is not None), None)

    @property
    def unstable(self) -> int:
        """Runs in which more work came than was served."""
        return sum(not run.stable for run in self.runs)

    def values(self, name: str) -> list[float]:
        """A figure of every seed; empty if one of them lacks it."""
        if self.error is not None:
            return []
        found = [run.figures.get(name) for run in self.runs]
        values = [value for value in found if value is not None]
        return values if len(values) == len(found) else []

    def estimate(self, name: str) -> Estimate | None:
        """Mean and Student's interval over the seeds."""
        return estimate_of(self.values(name))


def estimate_of(values: Sequence[float]) -> Estimate | None:
    """Mean and Student's interval; None of no values."""
    if not values:
        return None
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean)
    half = student_quantile(CONFIDENCE, len(values) - 1) * statistics.stdev(values)
    half /= math.sqrt(len(values))
    return Estimate(mean, max(0.0, mean - half) if min(values) >= 0 else mean - half, mean + half)


@dataclass(frozen=True, slots=True)
class Curve:
    """The points along the first axis, for one setting of all others."""

    name: str
    points: Sequence[Point]


def curves_of(axes: Sequence[Axis], points: Sequence[Point]) -> list[Curve]:
    """Points by everything but the first axis, in the order of the grid."""
    along, found = axes[0].name, dict[str, list[Point]]()
    for point in points:
        rest = {name: value for name, value in point.setting.items() if name != along}
        found.setdefault(" ".join(f"{n}={shown(v)}" for n, v in rest.items()), []).append(point)
    return [Curve(name, members) for name, members in found.items()]


def shown(value: object) -> str:
    """A value as it is written on a command line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)
