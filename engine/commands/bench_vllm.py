"""The offline workload in vLLM, as a process of its own: a job in, a JSON record out.

    python -m engine.commands.bench_vllm JOB OUT

`engine.commands.bench_compare` writes the job and starts it, so that neither engine finds the other
on the device.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.commands.bench_throughput import make_workload


def main(argv: list[str]) -> int:
    """Runs the job and writes the record."""
    job_path, out_path = argv
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    Path(out_path).write_text(json.dumps(run(job)), encoding="utf-8")
    return 0


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The record of vLLM's passes over the workload; the best after the first counts."""
    vllm: Any = import_module("vllm")
    workload = make_workload(**job["workload"])
    started = time.perf_counter()
    llm = vllm.LLM(
        model=job["folder"],
        load_format=job["load_format"],
        skip_tokenizer_init=True,
        **job["options"],
    )
    start_up_s = time.perf_counter() - started
    params = [
        vllm.SamplingParams(
            temperature=item.temperature,
            ignore_eos=True,
            max_tokens=item.max_tokens,
            detokenize=False,
        )
        for item in workload.params()
    ]
    passes = []
    for number in range(job["passes"]):
        prompts = [
            {"prompt_token_ids": prompt} for prompt in workload.variant(number, job["vocab_size"])
        ]
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        passes.append({"seconds": seconds, "output_tokens_per_s": num_tokens / seconds})
    return {
        "version": version("vllm"),
        "start_up_s": start_up_s,
        "output_tokens_per_s": max(p["output_tokens_per_s"] for p in passes[1:] or passes),
        "passes": passes,
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
