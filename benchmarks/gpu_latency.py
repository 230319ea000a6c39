"""One stream, a few streams and the time to the first token on one GPU, per model shape.

    python3 benchmarks/gpu_latency.py --out DIR [--models qwen3-0.6b,qwen3-8b]

Medians of passes with prompts of their own. Writes DIR/gpu_latency.json and prints a table last.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from engine.commands.bench_common import provenance, shape_folder
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.worker.probe import START_PROFILE, STOP_PROFILE, read_profile

SAMPLING = {
    "temperature": {"temperature": 0.6},
    "top-k 20, top-p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=".")
    parser.add_argument("--models", default="qwen3-0.6b,qwen3-8b")
    parser.add_argument("--streams", default="1,2,4,8,16")
    parser.add_argument("--prompts", default="32,512,2000,8192")
    parser.add_argument("--sampling", default=";".join(SAMPLING))
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="also time the kernels")
    args = parser.parse_args()
    record, table = {}, []
    for model in args.models.split(","):
        record[model] = measure(model, args, table)
        (Path(args.out) / "gpu_latency.json").write_text(json.dumps(record, indent=1))
    print("\n".join(["=" * 100, *table]))


def measure(model, args, table):
    started = time.perf_counter()
    with (
        shape_folder(None, model) as folder,
        LLM(
            folder,
            load_format="dummy",
            max_model_len=16384,
            max_num_batched_tokens=8192,
            async_scheduling=True,
            enable_prefix_caching=False,
        ) as llm,
    ):
        start_up_s = time.perf_counter() - started
        found = {"start_up_s": start_up_s, "parts": dict(llm.info.start_up_s)}
        table.append(f"{model}: start {start_up_s:.1f} s {llm.info.start_up_s}")
        found["tpot_ms"] = {}
        for streams in map(int, args.streams.split(",")):
            for name in args.sampling.split(";"):
                sampling = SAMPLING[name]
                tpot = stream_tpot(llm, streams, args, sampling)
                found["tpot_ms"][f"{streams} x {name}"] = tpot
                table.append(f"{model}: {streams} streams, {name}: {tpot:.3f} ms per token")
        found["ttft_ms"] = {}
        for length in map(int, args.prompts.split(",")):
            ttft = first_token(llm, length, args)
            found["ttft_ms"][str(length)] = ttft
            table.append(f"{model}: first token of {length}: {ttft:.2f} ms")
        if args.profile:
            found["profile"] = profile(llm, table)
        return found | provenance(llm)


def prompts_of(llm, count, length, rng):
    size = llm.model_config.vocab_size
    return [[rng.randrange(size) for _ in range(length)] for _ in range(count)]


def stream_tpot(llm, streams, args, sampling):
    """Median over the passes of the mean time per output token after the first."""
    rng = random.Random(streams)
    params = SamplingParams(ignore_eos=True, max_tokens=args.output_len, **sampling)
    found = []
    for _ in range(args.passes + 1):
        outputs = llm.generate(prompts_of(llm, streams, 32, rng), params, use_tqdm=False)
        times = [o.metrics.e2e_ms - o.metrics.ttft_ms for o in outputs]
        found.append(statistics.fmean(times) / (args.output_len - 1))
    return statistics.median(found[1:])


def first_token(llm, length, args):
    rng = random.Random(length)
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=1)
    found = []
    for _ in range(4 * args.passes + 1):
        (output,) = llm.generate(prompts_of(llm, 1, length, rng), params, use_tqdm=False)
        found.append(output.metrics.ttft_ms)
    return statistics.median(found[1:])


def profile(llm, table):
    """Kernels of decode steps of one row, and of a step with a prompt of 32 tokens."""
    rng = random.Random(0)
    result = {}
    for name, max_tokens in (("64 decode steps", 65), ("prompt", 1)):
        params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=max_tokens)
        llm.executor.ask(START_PROFILE)
        llm.generate(prompts_of(llm, 1, 32, rng), params, use_tqdm=False)
        found = read_profile(llm.executor.ask(STOP_PROFILE)[0])
        result[name] = [[k.name, k.total_ms, k.count] for k in found.kernels[:24]]
        table.append(f"  {name}: span {found.span_ms:.2f} ms, busy {found.busy_ms:.2f}")
        for kernel in found.kernels[:14]:
            mean = f"{kernel.total_ms / kernel.count * 1e3:7.2f} us"
            table.append(
                f"  {kernel.total_ms:8.3f} ms {kernel.count:5d} x {mean} {kernel.name[:70]}"
            )
    return result


if __name__ == "__main__":
    torch.set_num_threads(4)
    main()
