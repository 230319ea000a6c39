"""The multi-GPU benchmark runs from end to end, here over gloo with a toy model."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.cli import main as cli

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu_tp.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_tp", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(out, *options):
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--device", "cpu", "--tiny"]
    done = subprocess.run(
        [*command, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    return done, json.loads((out / "gpu_tp.json").read_text())


def test_two_ranks_are_measured_killed_and_logged(tmp_path):
    done, record = run(tmp_path, "--tp", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    speed, decisions = record["units"]
    assert speed["ok"]
    assert not speed["left_processes"]
    throughput = speed["throughput"]
    assert throughput["output_tokens_per_s"] > 0
    assert throughput["engine"]["tensor_parallel_size"] == 2
    assert len(throughput["peak_memory_bytes_by_rank"]) == 2
    for name in ("profile_decode", "profile_prefill"):
        profile = speed[name]
        assert len(profile["ranks"]) == 2
        for rank in profile["ranks"]:
            assert 0 < rank["share_of_span"] < 1
            reductions = [k for k in rank["kernels"] if k["name"] == "gloo:all_reduce"]
            # The embedding, two projections in each of two layers, and the keys of the draws.
            assert [k["runs_per_step"] for k in reductions] == [6]
            assert not any(k["name"] == "gloo:all_gather" for k in rank["kernels"])
    assert speed["profile_prefill"]["steps"] == 1
    kill = speed["kill"]
    assert kill["error_s"] < 30
    assert "ended with exit code -9" in kill["message"]
    assert kill["left_processes"] == kill["left_shared_memory"] == 0
    mixed = decisions["mixed"]
    assert mixed["requests"] == 20
    assert mixed["preemptions"] > 0
    assert mixed["cached_tokens"] > 0
    assert mixed["digests_equal"]
    assert mixed["digests_different_over_time"] > 1
    assert mixed["replay"] == "no difference"
    assert cli(["sim", "replay", str(tmp_path / mixed["log"])]) == 0
    assert "s in all" in done.stdout.splitlines()[-1]


def test_runs_that_fail_are_recorded_and_the_next_ones_start(tmp_path):
    done, record = run(tmp_path, "--tp", "3")
    assert done.returncode == 1
    speed, decisions = record["units"]
    for name in ("throughput", "kill"):
        assert "valid sizes" in speed[name]["error"]
    assert "valid sizes" in decisions["mixed"]["error"]
    assert not speed["ok"]
    assert "FAILED" in done.stdout


def test_a_run_that_hangs_is_ended_with_its_children(script, tmp_path):
    command = [sys.executable, "-c", "import os, time; os.fork(); time.sleep(100)"]
    process = subprocess.Popen(command, start_new_session=True)
    unit = {"kind": "speed", "model": "m", "tp": 2}
    found = script.finish(unit, tmp_path / "part.json", process, time.monotonic() + 0.5)
    assert not found["ok"]
    assert "time limit" in found["error"]
    assert script.is_group_over(process.pid)


def test_runs_of_one_size_share_the_machine(script):
    args = script.parse(["--tp", "1,2,4", "--models", "a,b", "--only", "speed"])
    sizes = [[(model, tp) for _, model, tp in batch] for batch in script.batches(args, 4)]
    assert sizes == [
        [("a", 1), ("b", 1)],
        [("a", 2), ("b", 2)],
        [("a", 4)],
        [("b", 4)],
    ]


def test_efficiency_is_the_rate_per_gpu_over_that_of_one(script):
    units = [
        {"kind": "speed", "model": "a", "tp": 1, "throughput": {"output_tokens_per_s": 100.0}},
        {"kind": "speed", "model": "a", "tp": 2, "throughput": {"output_tokens_per_s": 150.0}},
        {"kind": "speed", "model": "b", "tp": 2, "throughput": {"error": "lost"}},
    ]
    script.add_efficiency(units)
    assert [unit.get("efficiency") for unit in units] == [1.0, 0.75, None]
