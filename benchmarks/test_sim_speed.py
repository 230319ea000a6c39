"""How fast the simulator is: processor time and peak memory of whole `lockstep sim run` processes.

python -m pytest benchmarks/test_sim_speed.py --benchmark-only

With LOCKSTEP_RECORD=1 the figures are written to benchmarks/records/sim_speed.json. The first
workload is the one that other simulators were measured with: Poisson 8 requests/s, prompts
uniform 512-1536, outputs uniform 64-192, an 8B model on an H100.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "records" / "sim_speed.json"
SHARED = Path(os.environ.get("LOCKSTEP_SHARED", ROOT.parent / "shared"))
ANCHOR = "--workload poisson --rate 8 --model qwen3-8b --hardware h100 --cost roofline"
CASES = {
    "anchor_1k": f"{ANCHOR} --num-requests 1000",
    "anchor_10k": f"{ANCHOR} --num-requests 10000",
    "anchor_10k_with_outputs": f"{ANCHOR} --num-requests 10000 --out OUT",
    "anchor_10k_pool_of_ten_million_blocks": (
        f"{ANCHOR} --num-requests 10000 --num-kv-blocks 10000000"
    ),
    "anchor_100k": f"{ANCHOR} --num-requests 100000",
    "azure_conv_two_replicas_with_outputs": (
        "--trace TRACES/azure_llm_2023_conv.csv --model qwen3-8b --hardware h200 --replicas 2"
        " --out OUT"
    ),
}
# Runs the command line in a fresh process and reports its own resource use.
_CHILD = """
import json, resource, sys
from sim.commands.run import run_main
run_main(sys.argv[1:])
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024]))
"""


@pytest.mark.parametrize("case", CASES)
def test_whole_run(benchmark, tmp_path, case):
    words = (
        CASES[case].replace("OUT", str(tmp_path / "out")).replace("TRACES", str(SHARED / "traces"))
    )
    if "--trace" in words and not (SHARED / "traces").is_dir():
        pytest.skip("the recordings are not here")
    outputs: list[str] = []

    def run() -> None:
        command = [sys.executable, "-c", _CHILD, *words.split()]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        outputs.append(done.stdout.splitlines()[-1])

    rounds = 3 if case == "anchor_1k" else 1
    benchmark.pedantic(run, rounds=rounds, iterations=1)
    figures = [json.loads(output) for output in outputs]
    cpu_s = min(cpu for cpu, _ in figures)
    peak_mib = max(peak for _, peak in figures)
    benchmark.extra_info.update(cpu_s=round(cpu_s, 2), peak_mib=round(peak_mib, 1))
    if os.environ.get("LOCKSTEP_RECORD"):
        _record(case, cpu_s, peak_mib)


def _record(case: str, cpu_s: float, peak_mib: float) -> None:
    record = json.loads(RECORD.read_text()) if RECORD.is_file() else {"cases": {}}
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    record["command"] = (
        "LOCKSTEP_RECORD=1 python -m pytest benchmarks/test_sim_speed.py --benchmark-only"
    )
    record["cases"][case] = {
        "arguments": CASES[case],
        "cpu_s": round(cpu_s, 2),
        "peak_mib": round(peak_mib, 1),
        "commit": commit,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} shared cores",
        "numpy": metadata.version("numpy"),
        "simpy": metadata.version("simpy"),
    }
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
