"""What share of a simulation's processor time the calibrated cost model takes.

python benchmarks/calibrated_cost_share.py [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

from sim.cost.calibrated import CalibratedCost
from sim.run.deployment import Deployment, build
from sim.run.run import RunPlan, run_plan
from sim.workloads.generators import generate, preset

NUM_REQUESTS, RATE = 2000, 8.0


class Timed(CalibratedCost):
    """The model with a clock around every call from outside."""

    spent_s = 0.0
    depth = 0


def _timed(name):
    inner = getattr(CalibratedCost, name)

    def call(self, *arguments):
        self.depth += 1
        start = time.thread_time()
        result = inner(self, *arguments)
        self.depth -= 1
        if not self.depth:
            self.spent_s += time.thread_time() - start
        return result

    return call


for _name in ("step_time_ns", "decode_run_ns", "observe", "intake_ns"):
    setattr(Timed, _name, _timed(_name))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    workload = generate("poisson", preset("poisson", rate=RATE, num_requests=NUM_REQUESTS), 0)
    plan = RunPlan(workload, Deployment(hardware="h200", cost="calibrated"))

    parts = build(plan.deployment, 0)
    (plain,) = parts.costs
    timed = Timed(plain.profile, parts.physics)
    begin = time.thread_time()
    run_plan(plan, type(parts)(parts.model, parts.hardware, parts.kernel, parts.physics, (timed,)))
    total_s = time.thread_time() - begin
    document = {
        "command": "python benchmarks/calibrated_cost_share.py",
        "workload": f"poisson, {NUM_REQUESTS} requests, {RATE} req/s",
        "python": platform.python_version(),
        "simulation_cpu_s": round(total_s, 3),
        "cost_model_cpu_s": round(timed.spent_s, 3),
        "share": round(timed.spent_s / total_s, 4),
    }
    print(json.dumps(document, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
