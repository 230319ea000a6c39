"""What a prediction could reach that knew how fast a recorded run's host was at each moment.

    python benchmarks/host_floor.py RUN.json.gz ... [--out RECORD.json]

Simulates each asynchronous run with the shipped profile, whose launches follow the recorded
ones: their mean over about 0.3 s, with the scatter of single launches around it. Prints too by how
many percent the decisions of pure decode steps and the launches of each run were off the profile's.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from statistics import fmean

import numpy as np

from engine.steplog.vllm_recording import open_log
from sim.calibration.host_fit import prompt_launch_rows
from sim.calibration.pipeline_fit import launch_ns
from sim.calibration.pipeline_free import (
    percent_errors,
    recorded_figures,
    simulated_figures,
    target_physics,
)
from sim.calibration.pipeline_samples import pipeline_samples
from sim.cost.pipeline import Host
from sim.cost.pipelined import PipelinedCost
from sim.cost.profiles import find_profile
from sim.specs.hardware import hardware_named
from sim.specs.models import model_named

NEAR_NS, OWN_SCATTER, SEEDS = 0.3e9, 0.13, 4


class Told:
    """Launch factors as the run's own launches had them at that time."""

    def __init__(self, log, host, seed):
        rows = np.flatnonzero(prompt_launch_rows(log))
        self._errors = np.log(log.waits[rows] / launch_ns(log, host)[rows])
        self._times = log.begins[rows] - min(one.arrival for one in log.requests)
        self._random = random.Random(seed)

    def factor(self, time_ns: int) -> float:
        """The mean of the launches near that time, and a scatter."""
        weights = np.exp(-np.abs(self._times - time_ns) / NEAR_NS)
        level = float((weights * self._errors).sum() / (weights.sum() + 0.3))
        return math.exp(level + self._random.gauss(0, OWN_SCATTER))

    @property
    def mean_percent(self) -> float:
        """By how much all launches were off."""
        return 100 * float(self._errors.mean())


def main() -> None:
    """Prints errors in percent and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    profile = find_profile(model_named("qwen3-8b"), hardware_named("h200"), 1, True, "vllm 0.33")
    physics, record = target_physics(profile.target), {}
    for path in arguments.logs:
        log = pipeline_samples(open_log(path))
        recorded, found = recorded_figures(log), []
        for seed in range(SEEDS):
            cost = PipelinedCost(profile, physics)
            cost.host = Host(profile.host, Told(log, profile.host, seed))
            found.append(simulated_figures(log, cost, physics))
        means = {key: fmean(one[key] for one in found) for key in recorded}
        errors = percent_errors(means, recorded)
        quiet = ~log.has_chunks
        decisions = (log.decided - log.begins)[quiet]
        predicted = profile.host.schedule + profile.host.schedule_seq * log.num_seqs[quiet]
        slower = 100 * float(np.log(np.maximum(decisions, 1) / predicted).mean())
        record[path.name] = {
            "host_percent": {
                "decode decisions": round(slower, 1),
                "launches": round(Told(log, profile.host, 0).mean_percent, 1),
            },
            "told_host_percent": {key: round(error, 2) for key, error in errors.items()},
        }
        print(path.name, json.dumps(record[path.name], indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
