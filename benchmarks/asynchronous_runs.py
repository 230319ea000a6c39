"""How far cost models without a fit are from recorded asynchronous runs, as the client sees them.

    python benchmarks/asynchronous_runs.py RUN.json.gz ... [--out RECORD.json]

Prints errors in percent of the operator tables and of the roofline, both with the host of the
shipped profile of vLLM 0.33.0, beside those of the shipped profile itself (which was fitted to
these runs; `lockstep sim validate --held-out` leaves each out).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean

import numpy as np

from engine.steplog.vllm_recording import open_log
from sim.calibration.pipeline_fit import prompt_device_ns, pure_decodes
from sim.calibration.pipeline_free import (
    percent_errors,
    recorded_figures,
    simulated_figures,
    target_physics,
)
from sim.calibration.pipeline_samples import pipeline_samples
from sim.cost.hosted import HostedCost
from sim.cost.optable import OptableCost
from sim.cost.pipelined import PipelinedCost
from sim.cost.profiles import find_profile
from sim.cost.roofline import RooflineCost
from sim.specs.hardware import hardware_named
from sim.specs.models import model_named

SHOWN = ("output_throughput", "mean_ttft_ms", "p50_ttft_ms", "p99_ttft_ms", "mean_tpot_ms",
         "p50_tpot_ms", "p99_tpot_ms", "mean_e2el_ms", "p50_e2el_ms", "p99_e2el_ms")  # fmt: skip


def main() -> None:
    """Prints one table per run and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model, hardware = model_named(arguments.model), hardware_named(arguments.hardware)
    profile = find_profile(model, hardware, 1, True, "vllm 0.33")
    physics = target_physics(profile.target)
    devices = {"optable": OptableCost(physics), "roofline": RooflineCost(model, hardware)}
    record = {}
    for path in arguments.logs:
        log = pipeline_samples(open_log(path))
        recorded, document = recorded_figures(log), {}
        for name in ("calibrated", *devices):
            found = []
            for seed in range(arguments.seeds):
                cost = (
                    PipelinedCost(profile, physics, seed=seed)
                    if name == "calibrated"
                    else HostedCost(devices[name], profile, model.num_layers, seed)
                )
                found.append(simulated_figures(log, cost, physics))
            means = {key: fmean(one[key] for one in found) for key in SHOWN}
            errors = percent_errors(means, {key: recorded[key] for key in SHOWN})
            document[name] = {key: round(error, 2) for key, error in errors.items()}
        document["optable_steps"] = step_errors(log, devices["optable"], profile)
        record[path.name] = document
        print(path.name, json.dumps(document, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def step_errors(log, device, profile) -> dict[str, list[float]]:
    """Bias and mean absolute error in percent of decode periods and steps with prompts."""
    predicted = np.array([device.step_time_ns(one) for one in log.features], dtype=float)
    rows = pure_decodes(log)
    shown, times = prompt_device_ns(log, profile.graphs, np.array(profile.decode_ns), profile.host)
    found = {}
    for name, errors in (
        ("decode", predicted[rows] / log.periods[rows] - 1),
        ("prompt", predicted[shown] / times - 1),
    ):
        found[name] = [round(100 * float(errors.mean()), 2),
                       round(100 * float(np.abs(errors).mean()), 2)]  # fmt: skip
    return found


if __name__ == "__main__":
    main()
