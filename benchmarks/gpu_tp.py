"""Tensor parallelism on the GPUs of one machine: speed, share of collectives, loss of a rank.

    python3 benchmarks/gpu_tp.py --out DIR --tp 1,2 --models qwen3-0.6b,qwen3-8b

Every engine runs in a process of its own with a time limit, so that one failure costs one number.
Writes DIR/gpu_tp.json and step logs for `lockstep sim replay`, and prints a short table last.
With `--device cpu --tiny` the same runs on gloo with a toy model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
KINDS = ("speed", "decisions")
UNIT_LIMIT_S = {"speed": 130.0, "decisions": 70.0}
RECORDED_VARIABLES = ("NCCL_", "TORCH_NCCL_")
CPU_LIMIT_S = 240.0
POLICIES = "mixed,prefill_first"
# A unit that gets less than this would only be cut off.
LEAST_UNIT_S = 15.0


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=".")
    parser.add_argument("--tp", default="1,2")
    parser.add_argument("--models", default="qwen3-0.6b,qwen3-8b")
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--passes", type=int, default=2, help="the best after the first counts")
    parser.add_argument("--budget-s", type=float, default=330.0, help="no run starts later")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a toy model and small workloads")
    args = parser.parse_args(argv)
    args.models = ["tiny-qwen3"] if args.tiny else args.models.split(",")
    args.tp = [int(size) for size in args.tp.split(",")]
    return args


def command_line(args):
    line = f"gpu_tp.py --out DIR --tp {','.join(map(str, args.tp))} --models "
    line += f"{','.join(args.models)} --only {args.only} --passes {args.passes}"
    return line + f" --device {args.device}" + " --tiny" * args.tiny


def main(argv=None):
    args = parse(argv)
    started = time.monotonic()
    out = Path(args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    gpus = visible_gpus() if args.device == "cuda" else []
    record = {
        "benchmark": "tensor_parallel",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": command_line(args),
        "gpus": gpus,
        "nvlink": nvlink(gpus),
        "environment": {
            k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "TORCH_NCCL_"))
        },
        "units": [],
    }
    for batch in batches(args, len(gpus)):
        left = args.budget_s - (time.monotonic() - started)
        record["units"] += run_batch(batch, args, out, gpus, left)
        record["seconds"] = time.monotonic() - started
        (out / "gpu_tp.json").write_text(json.dumps(record, indent=1) + "\n")
    add_efficiency(record["units"])
    (out / "gpu_tp.json").write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(["=" * 100, *table(record)]), flush=True)
    return 0 if all(unit.get("ok") for unit in record["units"]) else 1


# Which runs, and which of them side by side ------------------------------------------------------


def batches(args, num_gpus):
    """Units (kind, model, tp); those of one batch run at the same time on GPUs of their own."""
    for kind in KINDS:
        if kind not in args.only.split(","):
            continue
        for size in args.tp:
            room = max(1, num_gpus // size)
            units = [(kind, model, size) for model in args.models]
            yield from (units[i : i + room] for i in range(0, len(units), room))


def run_batch(batch, args, out, gpus, left_s):
    with tempfile.TemporaryDirectory(prefix="gpu-tp-", ignore_cleanup_errors=True) as scratch:
        running = []
        for place, (kind, model, size) in enumerate(batch):
            part = out / f"part-{kind}-{model}-tp{size}.json"
            limit_s = min(UNIT_LIMIT_S[kind] if args.device == "cuda" else CPU_LIMIT_S, left_s)
            unit = {"kind": kind, "model": model, "tp": size, "beside": len(batch) - 1}
            if limit_s < LEAST_UNIT_S:
                running.append((unit | {"error": "no time left"}, part, None, 0.0))
                continue
            mine = gpus[place * size : (place + 1) * size]
            print(f"-- {kind} {model} tp {size} on {mine or 'cpu'}", flush=True)
            process = subprocess.Popen(
                command_of(kind, model, size, args, part, mine),
                env=environment_of(Path(scratch) / str(place), mine),
                start_new_session=True,
            )
            running.append((unit, part, process, time.monotonic() + limit_s))
        return [finish(*item) for item in running]


def command_of(kind, model, size, args, part, gpus):
    command = [sys.executable, str(HERE / "tp_unit.py"), "--kind", kind, "--model", model]
    command += ["--tp", str(size), "--part", str(part), "--gpus", ",".join(gpus)]
    command += ["--device", args.device, "--passes", str(args.passes)]
    command += ["--tiny"] * args.tiny
    # The second policy costs a start of its own; one model is enough for it.
    both = size > 1 and model == args.models[0] and not args.tiny
    return [*command, "--policies", POLICIES if both else "mixed"]


def environment_of(scratch, gpus):
    """That of this process, so that settings of NCCL reach the ranks."""
    scratch.mkdir()
    # In a folder of its own a file left behind cannot be a neighbour's.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    if gpus:
        # nvidia-smi counts in this order too.
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return environment


def finish(unit, part, process, deadline):
    """The unit's record; whatever it had written counts even if it was cut off."""
    if process is None:
        return unit
    try:
        code = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        code = "time limit"
    finally:
        # Its ranks are of its process group; soon after a good end there is none.
        unit["left_processes"] = process.returncode is not None and not is_group_over(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if part.exists():
        unit |= json.loads(part.read_text())
        part.unlink()
    if code != 0:
        unit.setdefault("error", f"ended with {code}")
    parts = [value for value in unit.values() if isinstance(value, dict)]
    unit["ok"] = code == 0 and not any("error" in value for value in parts)
    return unit


def is_group_over(group, patience_s=3.0):
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


# The machine -------------------------------------------------------------------------------------


def visible_gpus():
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    return [str(i) for i in range(len(smi("--query-gpu=index", "--format=csv,noheader")))]


def nvlink(gpus):
    return smi("topo", "-m")[:16] if gpus else []


def smi(*arguments):
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def commit():
    if os.environ.get("LOCKSTEP_COMMIT"):  # a copy of the tree may lack its history
        return os.environ["LOCKSTEP_COMMIT"]
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


# Results -------------------------------------------------------------------------------------


def rate_of(unit):
    return unit.get("throughput", {}).get("output_tokens_per_s")


def add_efficiency(units):
    """Rate over that of one GPU, and per GPU, where both were measured."""
    alone = {u["model"]: rate_of(u) for u in units if u["kind"] == "speed" and u["tp"] == 1}
    for unit in units:
        if unit["kind"] == "speed" and rate_of(unit) and alone.get(unit["model"]):
            unit["speed_up"] = rate_of(unit) / alone[unit["model"]]
            unit["efficiency"] = unit["speed_up"] / unit["tp"]


def table(record):
    for unit in record["units"]:
        name = f"{unit['kind']:<10}{unit['model']:<12} tp {unit['tp']}"
        yield f"{name}: {'ok' if unit.get('ok') else 'FAILED ' + unit.get('error', '')}"
        for part, line in LINES.items():
            found = unit.get(part)
            if not isinstance(found, dict):
                continue
            if "error" in found:
                yield f"    {part:<16} FAILED {found['error'][-200:]}"
            else:
                yield f"    {part:<16} {line(found)}"
        if "efficiency" in unit:
            gain = f"{unit['speed_up']:.2f} x one GPU, efficiency {unit['efficiency']:.0%}"
            yield f"    {'scaling':<16} {gain}"
    yield f"{record['seconds']:.0f} s in all, commit {record['commit']}"


def throughput_line(found):
    peaks = [f"{(peak or 0) / 2**30:.1f}" for peak in found["peak_memory_bytes_by_rank"]]
    steps = found["passes"][-1]["steps"]
    longest = sorted(steps.items(), key=lambda item: -item[1]["total_s"])[:4]
    medians = ", ".join(
        f"{kind} {step['duration_ms_p50']:.2f}/{step['device_ms_p50']:.2f}"
        for kind, step in longest
    )
    rates = ", ".join(f"{one['output_tokens_per_s']:,.0f}" for one in found["passes"])
    return (
        f"{found['output_tokens_per_s']:,.0f} tok/s ({rates}), start {found['start_up_s']:.1f} s, "
        f"peak GiB by rank {peaks}, median step/device ms: {medians}"
    )


def profile_line(found):
    by_rank = ", ".join(
        f"rank {rank}: {item['collective_ms_per_step']:.3f} of {item['span_ms_per_step']:.3f} ms"
        f" = {item['share_of_span']:.1%}"
        for rank, item in enumerate(found["ranks"])
    )
    return f"collectives {by_rank}; without profiler {found['step_ms']:.3f} ms a step"


def kill_line(found):
    return (
        f"rank {found['rank']}: error after {found['error_s']:.2f} s, memory freed after "
        f"{found['memory_freed_s']} s ({found['memory_start_mib']} -> {found['memory_full_mib']} "
        f"-> {found['memory_end_mib']} MiB), left: {found['left_processes']} processes, "
        f"{found['left_shared_memory']} shared-memory files"
    )


def decisions_line(found):
    return (
        f"{found['num_steps']} steps, {found['preemptions']} preemptions, "
        f"{found['cached_tokens']} cached tokens, digests equal: {found['digests_equal']}, "
        f"replay: {found['replay']}, closed in {found['close_s']:.1f} s"
    )


LINES = {
    "throughput": throughput_line,
    "profile_decode": profile_line,
    "profile_prefill": profile_line,
    "kill": kill_line,
    "mixed": decisions_line,
    "prefill_first": decisions_line,
}

if __name__ == "__main__":
    sys.exit(main())
