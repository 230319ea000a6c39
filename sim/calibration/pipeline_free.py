"""Free-running simulation of asynchronous runs, from arrivals and lengths alone."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from engine.core.errors import InputError
from sim.calibration.pipeline_samples import PipelineSamples, RequestTimes
from sim.cluster.router import make_router
from sim.cluster.simulation import Simulation
from sim.cost.physics import Physics
from sim.cost.pipeline_profile import PipelineProfile
from sim.cost.pipelined import PipelinedCost
from sim.cost.profile import Target
from sim.cost.work import Floats
from sim.specs.hardware import hardware_named
from sim.specs.models import ModelShape
from sim.workloads.recorded import PromptWorkload
from sim.workloads.table import Workload

# The host's speed drifts, so a run is predicted by the mean over so many drawn ones.
NUM_SEEDS = 8
LATENCIES = ("ttft", "tpot", "e2el")


def target_physics(target: Target) -> Physics:
    """The limits of the hardware and model that a profile was made for."""
    shape = {key: value for key, value in target.model.items() if key != "name"}
    model = ModelShape(name=str(target.model["name"]), max_position=1 << 30, **shape)
    return Physics(model, hardware_named(target.hardware), target.tp)


def recorded_figures(log: PipelineSamples) -> dict[str, float]:
    """Latencies in ms and throughput as the client saw them.

    Where no client was recorded, a token is seen when its step is booked.
    """
    seen: dict[object, list[float]] = {one.id: [] for one in log.requests}
    for step, sampled in enumerate(log.sampled):
        for request_id in sampled:
            seen[request_id].append(log.booked[step])
    rows = []
    for one in log.requests:
        tokens = list(one.tokens) if one.tokens is not None else seen[one.id]
        if not tokens:
            raise InputError(f"{log.name}: request {one.id!r} got no token")
        rows.append((one.arrival, tokens[0], tokens[-1], len(tokens)))
    return _figures(np.array(rows, dtype=np.float64))


def predicted_figures(
    log: PipelineSamples, profile: PipelineProfile, seeds: Sequence[int] = range(NUM_SEEDS)
) -> dict[str, float]:
    """The means over seeds of what the simulator says of the same requests."""
    physics = target_physics(profile.target)
    found = [
        simulated_figures(log, PipelinedCost(profile, physics, seed=seed), physics)
        for seed in seeds
    ]
    return {key: fmean(one[key] for one in found) for key in found[0]}


def simulated_figures(
    log: PipelineSamples, cost: PipelinedCost, physics: Physics
) -> dict[str, float]:
    """One simulation of a log's requests."""
    simulation = Simulation(
        workload_of(log), log.header.kernel, [cost], physics, make_router("round-robin")
    )
    ledger = simulation.run().ledger
    columns = (ledger.arrival_ns, ledger.first_token_ns, ledger.finish_ns, ledger.output_tokens)
    return _figures(np.array(columns, dtype=np.float64).T)


def workload_of(log: PipelineSamples) -> Workload:
    """The requests of a log in the order of their arrivals."""
    ordered: list[RequestTimes] = sorted(log.requests, key=lambda one: one.arrival)
    first = int(ordered[0].arrival)
    made = PromptWorkload(
        name=log.name,
        arrival_ns=array("q", [int(one.arrival) - first for one in ordered]),
        prompt_tokens=array("q", [one.prompt_tokens for one in ordered]),
        output_tokens=array("q", [one.output_tokens for one in ordered]),
    )
    made.prompts = tuple([one.prompt for one in ordered])
    return made


def _figures(rows: Floats) -> dict[str, float]:
    """From arrival, first and last token in ns, and the number of tokens of each request."""
    arrival, first, last, tokens = rows.T
    many = tokens > 1
    values = {
        "ttft": (first - arrival) / 1e6,
        "tpot": (last - first)[many] / 1e6 / (tokens[many] - 1),
        "e2el": (last - arrival) / 1e6,
    }
    found = {"output_throughput": float(tokens.sum() / (last.max() - arrival.min()) * 1e9)}
    for name, column in values.items():
        found[f"mean_{name}_ms"] = float(column.mean()) if len(column) else float("nan")
        for percent in (50, 99):
            found[f"p{percent}_{name}_ms"] = (
                float(np.percentile(column, percent)) if len(column) else float("nan")
            )
    return found


def percent_errors(predicted: dict[str, float], recorded: dict[str, float]) -> dict[str, float]:
    """Predicted / recorded - 1 in percent."""
    return {key: 100 * (predicted[key] / recorded[key] - 1) for key in recorded}
