"""Intervals on a run's figures: the run repeated with other seeds and resampled step errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.core import ConfigError
from sim.cost.calibrated import CalibratedCost
from sim.cost.features import CostModel
from sim.cost.hosted import HostedCost
from sim.cost.noise import Noise, Replicate
from sim.cost.noise import replicates as shared_out
from sim.cost.pipelined import PipelinedCost, replicate_cost
from sim.metrics.percentiles import percentiles
from sim.metrics.run_summary import RunIntervals
from sim.run.deployment import Parts, build
from sim.run.run import RunPlan, run_plan

# A 90 % interval lies between these percentiles of the replicates.
BOUNDS = (5.0, 95.0)
LEAST_REPLICATES = 5


def run_intervals(
    plan_of: Callable[[int], RunPlan],
    seed: int,
    replicates: int,
    on_progress: Callable[[int], None] | None = None,
) -> RunIntervals:
    """Repeats a run; `plan_of(seed)` makes the plan with a workload drawn from that seed.

    A calibrated model adds the errors that its steps had on logs that it was not fitted to; device
    models beside a host add the measured error of their class, and the host's drift. Others have
    no known errors, so their intervals are those of the seeds alone.

    Raises:
        ConfigError: too few replicates.
    """
    if replicates < LEAST_REPLICATES:
        raise ConfigError("intervals", replicates, f"must be at least {LEAST_REPLICATES}")
    values: dict[str, list[float]] = {}
    num_unstable = 0
    resampled: tuple[str, ...] = ("seed",)
    for serial, replicate in enumerate(shared_out(replicates, seed)):
        plan = plan_of(seed + 1 + serial)
        parts = with_noise(build(plan.deployment, plan.seed), plan.seed, replicate)
        resampled = _resampled(parts.costs[0])
        summary = run_plan(plan, parts).summary
        num_unstable += not summary.sim.stable
        if on_progress is not None:
            on_progress(serial + 1)
        for key, value in summary.to_json().items():
            if isinstance(value, float):
                values.setdefault(key, []).append(value)
    bounds = {
        key: _bounds(column) if len(column) == replicates else None
        for key, column in values.items()
    }
    return RunIntervals(
        replicates=replicates,
        level=(BOUNDS[1] - BOUNDS[0]) / 100,
        resampled=resampled,
        unstable_replicates=num_unstable,
        bounds=bounds,
    )


def with_noise(parts: Parts, seed: int, replicate: Replicate) -> Parts:
    """The same parts with calibrated costs that draw step errors; others stay as they are.

    All replicas are the same replicate, since they share one profile.
    """
    costs = tuple(
        _noisy(cost, parts, 1009 * seed + index, replicate)
        for index, cost in enumerate(parts.costs)
    )
    return replace(parts, costs=costs)


def _resampled(cost: CostModel) -> tuple[str, ...]:
    """What the replicates of a cost model differ by."""
    if isinstance(cost, CalibratedCost | PipelinedCost):
        return ("seed", "step errors", "cost of shared reads")
    if isinstance(cost, HostedCost):
        return ("seed", "host speed", "error of the class of cost models")
    return ("seed",)


def _noisy(cost: CostModel, parts: Parts, seed: int, replicate: Replicate) -> CostModel:
    if isinstance(cost, CalibratedCost):
        noise = Noise(cost.profile.noise, seed, replicate)
        return CalibratedCost(cost.profile, parts.physics, noise)
    if isinstance(cost, PipelinedCost):
        return replicate_cost(cost.profile, parts.physics, seed, replicate)
    if isinstance(cost, HostedCost):
        return cost.replicate(replicate.level, seed)
    return cost


def _bounds(column: Sequence[float]) -> tuple[float, float]:
    low, high = percentiles(column, BOUNDS)
    return low, high
