"""`lockstep bench compare`: this engine and vLLM on the same workload, one after the other.

The workload is that of `lockstep bench throughput`. vLLM runs first, in a process of its own at its
defaults but for what the workload fixes; where it is not installed, only this engine is measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.commands.bench_throughput import Workload, throughput_arguments
from engine.commands.options import engine_options
from engine.core.errors import LockstepError

_LONGEST_ERROR = 2000


class CompareFailed(LockstepError):
    """The other engine is installed and did not finish."""


def main(argv: Sequence[str]) -> int:
    """Runs the verb."""
    args, workload = throughput_arguments("bench compare", __doc__, argv)
    from engine.commands.bench_common import shape_folder, write_record
    from engine.commands.bench_throughput import run

    with shape_folder(args.model, args.like) as folder:
        other = vllm_record(folder, args)
        own = run({**engine_options(args), "model": folder}, workload, args.passes)
    if args.out is not None:
        write_record({"benchmark": "compare", "lockstep": own, "vllm": other}, args.out)
    print(table(own, other, workload))
    return 0


def vllm_record(folder: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """What vLLM did with the workload; None where it is not installed.

    Raises:
        CompareFailed: it is installed and did not finish.
    """
    if importlib.util.find_spec("vllm") is None:
        return None
    from engine.models.config import load_model_config

    job = {
        "folder": folder,
        "load_format": "dummy" if args.load_format == "dummy" else "auto",
        "vocab_size": load_model_config(folder).vocab_size,
        "passes": args.passes,
        "workload": {
            "num_seqs": args.num_seqs,
            "seed": args.workload_seed,
            "least": args.min_len,
            "most": args.max_len,
        },
        "options": {
            "max_model_len": args.max_model_len,
            "dtype": args.dtype,
            "tensor_parallel_size": args.tensor_parallel_size,
            "gpu_memory_utilization": args.gpu_memory_utilization,
        },
    }
    with tempfile.TemporaryDirectory(prefix="lockstep-") as place:
        job_path, out_path = Path(place) / "job.json", Path(place) / "out.json"
        job_path.write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-m", "engine.commands.bench_vllm", str(job_path), str(out_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not out_path.exists():
            raise CompareFailed(f"vLLM did not finish: {done.stderr.strip()[-_LONGEST_ERROR:]}")
        record: dict[str, Any] = json.loads(out_path.read_text(encoding="utf-8"))
        return record


def table(own: dict[str, Any], other: dict[str, Any] | None, workload: Workload) -> str:
    """The figures of both engines, and their ratio."""
    lines = [
        f"{workload.num_prompt_tokens:,} prompt and {workload.num_output_tokens:,} output tokens, "
        f"{own['engine']['device_name']}",
        _line("lockstep", own),
    ]
    if other is None:
        lines.append("vLLM is not installed here: pip install vllm, and run this again")
        return "\n".join(lines)
    lines.append(_line(f"vLLM {other['version']}", other))
    ratio = own["output_tokens_per_s"] / other["output_tokens_per_s"]
    lines.append(f"ratio {ratio:.3f}: lockstep / vLLM, best pass after the first of each")
    return "\n".join(lines)


def _line(name: str, record: dict[str, Any]) -> str:
    passes = ", ".join(f"{item['output_tokens_per_s']:,.0f}" for item in record["passes"])
    return (
        f"{name:<14} {record['output_tokens_per_s']:>10,.0f} tok/s (passes {passes}), "
        f"start-up {record['start_up_s']:.1f} s"
    )
