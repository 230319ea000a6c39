"""The engine under open-loop load on one GPU: requests of a recording at its arrival times.

    python3 benchmarks/gpu_online.py --out DIR --requests conv_40.json.gz conv_90.json.gz

One thread submits requests when they are due and steps the engine (no server, no detokenisation).
Prompts are random ids of the recorded lengths; prefix groups are not reproduced. Writes
DIR/online.json with percentiles, the device's idle time and provenance, and prints a table last.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.commands.bench_common import percentiles, provenance, shape_folder
from engine.llm import LLM
from engine.sampling_params import SamplingParams


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=".")
    parser.add_argument("--requests", nargs="+", required=True)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--seconds", type=float, help="only arrivals before this time")
    parser.add_argument("--log", action="store_true", help="also write step logs")
    args = parser.parse_args()
    record, table = {}, []
    for path in map(Path, args.requests):
        name = path.name.split(".")[0]
        record[name] = found = measure(path, name, args)
        table.append(
            f"{name}: {found['output_tokens_per_s']:,.0f} tok/s, TTFT "
            + " / ".join(f"{found['ttft_ms'][k]:.1f}" for k in ("mean", "p50", "p99"))
            + ", TPOT "
            + " / ".join(f"{found['tpot_ms'][k]:.2f}" for k in ("mean", "p50", "p99"))
            + f", device busy {found['device_busy_share']:.1%}"
        )
        (Path(args.out) / "online.json").write_text(json.dumps(record, indent=1))
    print("\n".join(["=" * 100, *table]))


def measure(path, name, args):
    recording = json.loads(gzip.decompress(path.read_bytes()))
    requests = sorted(recording["requests"], key=lambda r: r["arrival_us"])
    if args.seconds is not None:
        requests = [r for r in requests if r["arrival_us"] < args.seconds * 1e6]
    log = str(Path(args.out) / f"{name}.jsonl.gz") if args.log else None
    with (
        shape_folder(None, args.model) as folder,
        LLM(
            folder,
            load_format="dummy",
            max_model_len=16384,
            max_num_batched_tokens=8192,
            async_scheduling=True,
            step_log=log,
        ) as llm,
    ):
        rng = random.Random(0)
        prompts = [[rng.randrange(10_000) for _ in range(r["prompt_tokens"])] for r in requests]
        params = [
            SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=r["output_tokens"])
            for r in requests
        ]
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
        outputs, seconds, device_ns = serve(llm, requests, prompts, params)
        return {**summary(outputs, seconds, device_ns), **provenance(llm)}


def serve(llm, requests, prompts, params):
    """Outputs with the time that each request was late when it was submitted, in ms."""
    outputs, late_ms, device_ns = [], {}, 0

    def count(step):
        nonlocal device_ns
        device_ns += step.device_ns or 0

    llm.on_step = count
    next_request, begin = 0, time.perf_counter()
    while len(outputs) < len(requests):
        now = time.perf_counter() - begin
        while next_request < len(requests) and requests[next_request]["arrival_us"] <= now * 1e6:
            due = requests[next_request]["arrival_us"] / 1e6
            (request_id,) = llm.add_requests([prompts[next_request]], params[next_request])
            late_ms[request_id] = (time.perf_counter() - begin - due) * 1e3
            next_request += 1
        if llm.has_unfinished_requests:
            outputs += llm.step()
        elif next_request < len(requests):
            time.sleep(max(0.0, requests[next_request]["arrival_us"] / 1e6 - now) / 2)
    llm.on_step = None
    seconds = time.perf_counter() - begin
    return [(output, late_ms[output.request_id]) for output in outputs], seconds, device_ns


def summary(outputs, seconds, device_ns):
    ttft, tpot, num_tokens = [], [], 0
    for output, late_ms in outputs:
        count = len(output.outputs[0].token_ids)
        num_tokens += count
        ttft.append(output.metrics.ttft_ms + late_ms)
        if count > 1:
            tpot.append((output.metrics.e2e_ms - output.metrics.ttft_ms) / (count - 1))
    return {
        "requests": len(outputs),
        "seconds": seconds,
        "output_tokens_per_s": num_tokens / seconds,
        "ttft_ms": percentiles(ttft),
        "tpot_ms": percentiles(tpot),
        "device_busy_share": device_ns / 1e9 / seconds,
    }


if __name__ == "__main__":
    main()
