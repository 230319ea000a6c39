"""Writes step logs of a GPU engine under pressure, for `lockstep sim replay` to decide again.

    python benchmarks/gpu_logs.py --out DIR

64 requests that share prefixes, in a pool so small that requests are preempted; one log for each
backend, policy and way of scheduling. Prints one line per log.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.commands.bench_common import shape_folder
from engine.llm import LLM
from engine.sampling_params import SamplingParams


def workload():
    """Prompts of which every fourth shares a prefix of 300 tokens."""
    rng = random.Random(1)
    shared = [rng.randrange(10_000) for _ in range(300)]
    prompts = []
    for number in range(64):
        own = [rng.randrange(10_000) for _ in range(rng.randint(40, 400))]
        prompts.append((shared + own) if number % 4 == 0 else own)
    params = [
        SamplingParams(temperature=0.7, ignore_eos=number % 3 > 0, max_tokens=rng.randint(20, 260))
        for number in range(64)
    ]
    return prompts, params


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    prompts, params = workload()
    for (backend, block_size), policy, ahead in itertools.product(
        (("triton", 16), ("flash_attn", 256)), ("mixed", "prefill_first"), (False, True)
    ):
        name = f"{backend}_{policy}_{'async' if ahead else 'sync'}"
        path = Path(args.out) / f"steps_{name}.jsonl.gz"
        with (
            shape_folder(None, "qwen3-0.6b") as folder,
            LLM(
                folder,
                load_format="dummy",
                attention_backend=backend,
                block_size=block_size,
                policy=policy,
                async_scheduling=ahead,
                max_model_len=1024,
                max_num_seqs=32,
                max_num_batched_tokens=512,
                num_kvcache_blocks=6_144 // block_size,
                step_log=str(path),
                debug=True,
            ) as llm,
        ):
            outputs = llm.generate(prompts, params, use_tqdm=False)
        print(name, len(outputs), "outputs,", path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
