"""How much the cost of a repeated read of a shared KV block decides in a run with shared prefixes.

    python benchmarks/shared_read_effect.py LOG... --run NAME [--out FILE]

The named log is predicted free-running by a fit to the others, with the noise of recorded steps and
different costs of a repeated read; errors are medians over seeds, in percent.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from sim.commands.validate import held_out_profiles, physics_of
from sim.cost.noise import Noise, Replicate
from sim.specs.models import model_named
from sim.validation.predicted import free_running
from sim.validation.recorded import read_run

COSTS = (0.33, 0.45, 0.6, 0.75, 0.87)
SEEDS = 12
KEYS = (
    "mean_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms", "mean_e2el_ms",
    "median_e2el_ms", "p99_e2el_ms",
)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--run", required=True, help="file name of the log to predict")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    runs = [read_run(path) for path in arguments.logs]
    place = [run.name for run in runs].index(arguments.run)
    profile = held_out_profiles(runs, model_named("qwen3-8b"), "h200", "bfloat16", 1)[place]
    recorded, physics = runs[place].outcome.metrics(), physics_of(profile)
    found = {}
    for cost in COSTS:
        outcomes = []
        for seed in range(SEEDS):
            noise = Noise(profile.noise, seed, Replicate(shared_read_cost=cost))
            outcomes.append(free_running(runs[place], profile, physics, noise)[0].metrics())
        found[str(cost)] = {
            key: round(
                float(np.median([one[key] for one in outcomes]) / recorded[key] - 1) * 100, 1
            )
            for key in KEYS
        }
        print(cost, found[str(cost)], flush=True)
    document = {
        "command": f"python benchmarks/shared_read_effect.py LOGS --run {arguments.run}",
        "seeds": SEEDS,
        "error_percent": found,
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
