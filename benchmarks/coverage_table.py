"""Which cost model covers which model on which GPU, with the fewest GPUs that hold it.

    python benchmarks/coverage_table.py [--out RECORD.json]

Each cell simulates a short workload under `--engine vllm-0.33`, so that it is shown to run, and
says the class of trust, the tensor parallel size and the mean TPOT in ms.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from engine.core.errors import ConfigError, InputError
from sim.run.deployment import build, deployment_with
from sim.run.run import RunPlan, run_plan
from sim.workloads.generators import generate, preset
from sim.workloads.readers import read_lengths

MODELS = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b",
          "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-3.1-70b", "mistral-7b",
          "qwen2.5-7b", "qwen2.5-72b", "qwen3-30b-a3b", "mixtral-8x7b")  # fmt: skip
GPUS = ("b200", "h200", "h100", "a100-80gb", "l40s", "rtxpro6000", "rtx4090", "h100-pcie", "l4",
        "a10")  # fmt: skip
TP = (1, 2, 4, 8)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    table = {model: {gpu: cell(model, gpu) for gpu in GPUS} for model in MODELS}
    print("| | " + " | ".join(GPUS) + " |")
    print("|---" * (len(GPUS) + 1) + "|")
    for model, row in table.items():
        print(f"| {model} | " + " | ".join(text(row[gpu]) for gpu in GPUS) + " |")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def cell(model: str, gpu: str) -> dict[str, object] | None:
    """The first size that runs; None where even the largest does not hold the model."""
    for tp in TP:
        given = {"model": model, "hardware": gpu, "tp": tp, "engine": "vllm-0.33"}
        spec = preset("poisson", rate=2.0, prompt="512", output="64", num_requests=20)
        plan = RunPlan(generate("poisson", spec, 0, read_lengths), deployment_with(given))
        try:
            summary = run_plan(plan, build(plan.deployment, 0)).summary
        except (ConfigError, InputError):
            continue
        assert summary.sim.physical_floor.violations == 0
        trust = summary.sim.trust
        return {"kind": trust.kind, "tp": tp, "mean_tpot_ms": round(summary.tpot.mean, 2)}
    return None


def text(found: dict[str, object] | None) -> str:
    """A cell for people."""
    if found is None:
        return "-"
    tp = f" x{found['tp']}" if found["tp"] != 1 else ""
    return f"{found['kind']}{tp} {found['mean_tpot_ms']}"


if __name__ == "__main__":
    main()
