"""What the weaknesses that the policies keep by design cost on a public trace, as a table.

    python benchmarks/weakness_cost.py azure_llm_2023_conv.csv

Qwen3-8B on one simulated H200 with roofline costs and a pool that the trace just fills, so that
requests are preempted now and then. Each row changes one option.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from sim.metrics.run_summary import RunSummary
from sim.run.deployment import Deployment, build
from sim.run.run import RunPlan, run_plan
from sim.workloads.readers import TraceOptions, read_trace
from sim.workloads.table import Workload

BLOCKS = 1200
ROWS: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("mixed", "as it is", {}),
    ("mixed", "watermark_blocks=12", {"watermark_blocks": 12}),
    ("mixed", "watermark_blocks=60", {"watermark_blocks": 60}),
    ("mixed", "reserve_full_prompt=False", {"reserve_full_prompt": False}),
    ("mixed", "max_num_batched_tokens=512", {"max_num_batched_tokens": 512}),
    ("prefill_first", "as it is", {}),
    ("prefill_first", "max_num_batched_tokens=512", {"max_num_batched_tokens": 512}),
)


def measure(workload: Workload, policy: str, changes: dict[str, object]) -> RunSummary:
    """One run; the options are the kernel's own."""
    deployment = Deployment(
        model="qwen3-8b", hardware="h200", policy=policy, num_kv_blocks=BLOCKS, cost="roofline"
    )
    parts = build(deployment, 0)
    kernel = replace(parts.kernel, **changes)
    return run_plan(RunPlan(workload, deployment), replace(parts, kernel=kernel)).summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--num-requests", type=int, default=3000)
    args = parser.parse_args()
    print("| policy | option | preemptions | mean TTFT ms | p99 ITL ms | mean E2E ms |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for policy, text, changes in ROWS:
        workload = read_trace(args.trace, TraceOptions(num_requests=args.num_requests))
        figures = measure(workload, policy, changes).to_json()
        told = [figures[name] for name in ("mean_ttft_ms", "p99_itl_ms", "mean_e2el_ms")]
        numbers = " | ".join("-" if value is None else f"{value:.0f}" for value in told)
        print(
            f"| {policy} | {text} | {figures['sim']['num_preemptions']} | {numbers} |", flush=True
        )


if __name__ == "__main__":
    main()
