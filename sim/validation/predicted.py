"""The predicted side: the simulator on a recorded run's requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sim.calibration.pauses import PausingCost
from sim.cluster.router import make_router
from sim.cluster.simulation import Simulation
from sim.cost.calibrated import CalibratedCost
from sim.cost.noise import Noise, replicates
from sim.cost.physics import Physics
from sim.cost.profile import Profile
from sim.metrics.percentiles import percentiles
from sim.metrics.result import RunResult
from sim.validation.outcome import Curves, Outcome
from sim.validation.recorded import RecordedRun

# A 90 % interval lies between these percentiles of the replicates.
INTERVAL = (5.0, 95.0)


@dataclass(frozen=True, slots=True)
class Intervals:
    """Percentiles of each metric over noisy replicates, their medians and means."""

    num_replicates: int
    bounds: dict[str, tuple[float, float]]
    medians: dict[str, float]
    means: dict[str, float]


def has_pauses(run: RecordedRun, profile: Profile) -> bool:
    """Whether the run was recorded by a process whose pauses the profile knows."""
    return profile.pauses is not None and run.log.header.writer == "import"


def free_running(
    run: RecordedRun, profile: Profile, physics: Physics, noise: Noise | None = None
) -> tuple[Outcome, CalibratedCost | PausingCost]:
    """Simulates the run's requests with predicted step times."""
    steady = CalibratedCost(profile, physics, noise)
    pauses = profile.pauses if has_pauses(run, profile) else None
    cost = steady if pauses is None else PausingCost(steady, pauses)
    simulation = Simulation(run.workload, run.kernel, [cost], physics, make_router("round-robin"))
    return simulated_outcome(simulation.run()), cost


def intervals(
    run: RecordedRun, profile: Profile, physics: Physics, count: int, seed: int
) -> Intervals:
    """Repeats the simulation with resampled step errors."""
    values: dict[str, list[float]] = {}
    for serial, replicate in enumerate(replicates(count, seed)):
        noise = Noise(profile.noise, seed * 100_003 + serial, replicate)
        outcome, _ = free_running(run, profile, physics, noise)
        for key, value in outcome.metrics().items():
            values.setdefault(key, []).append(value)
    bounds = {key: _bounds(column) for key, column in values.items()}
    medians = {key: float(np.median(column)) for key, column in values.items()}
    means = {key: float(np.mean(column)) for key, column in values.items()}
    return Intervals(count, bounds, medians, means)


def _bounds(column: Sequence[float]) -> tuple[float, float]:
    low, high = percentiles(column, INTERVAL)
    return low, high


def simulated_outcome(result: RunResult) -> Outcome:
    """The outcome of a run on one server that completed every request."""
    ledger, (stats,) = result.ledger, result.servers
    times, running = stats.timeline.curve("running", result.end_ns)
    _, blocks = stats.timeline.curve("kv_blocks", result.end_ns)
    return Outcome(
        arrival_ns=np.array(ledger.arrival_ns, dtype=np.int64),
        first_token_ns=np.array(ledger.first_token_ns, dtype=np.int64),
        finish_ns=np.array(ledger.finish_ns, dtype=np.int64),
        output_tokens=np.array(ledger.output_tokens, dtype=np.int64),
        gaps=stats.gaps,
        end_ns=result.end_ns,
        running_ns=float(stats.running_ns),
        kv_block_ns=float(stats.kv_block_ns),
        kv_peak_blocks=stats.kv_peak_blocks,
        num_blocks=stats.num_blocks,
        num_steps=stats.num_steps,
        curves=Curves(times, running, blocks),
    )
