"""Operator tables against offline throughput that was measured on an H200.

    python benchmarks/offline_throughput.py [--out RECORD.json]

nano-vLLM's benchmark: 256 prompts of 100 to 1,024 tokens at once, as many outputs each. Measured
are vLLM 0.33.0's best passes on one H200 (bf16); offline it takes 16,384 tokens a step there.
"""

from __future__ import annotations

import argparse
import json
import random
from array import array
from pathlib import Path

from sim.run.deployment import build, deployment_with
from sim.run.run import RunPlan, run_plan
from sim.workloads.table import Workload

MEASURED = {"qwen3-0.6b": 22_018, "qwen3-8b": 9_004, "qwen3-30b-a3b": 5_810}


def main() -> None:
    """Prints predicted and measured output tokens per second."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    record = {}
    for model, measured in MEASURED.items():
        given = {"model": model, "hardware": "h200", "engine": "vllm-0.33", "cost": "optable",
                 "max_num_batched_tokens": 16_384, "max_model_len": 4_096}  # fmt: skip
        plan = RunPlan(workload(), deployment_with(given))
        predicted = run_plan(plan, build(plan.deployment, 0)).summary.output_throughput
        error = 100 * (predicted / measured - 1)
        record[model] = {"predicted": round(predicted), "measured": measured,
                         "error_percent": round(error, 1)}  # fmt: skip
        print(f"{model}: {predicted:,.0f} tok/s, measured {measured:,}: {error:+.1f} %")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def workload() -> Workload:
    """The benchmark's lengths, drawn as it draws them."""
    drawn = random.Random(0)
    prompts = []
    for _ in range(256):
        length = drawn.randint(100, 1024)
        for _ in range(length):
            drawn.randint(0, 10_000)
        prompts.append(length)
    outputs = [drawn.randint(100, 1024) for _ in range(256)]
    assert (sum(prompts), sum(outputs)) == (142_827, 133_966)
    return Workload("offline", array("q", [0]) * 256, array("q", prompts), array("q", outputs))


if __name__ == "__main__":
    main()
