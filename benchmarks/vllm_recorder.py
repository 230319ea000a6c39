"""Drives vLLM's own scheduler, recorded, on a CPU with a fake model, and replays what it recorded.

    pip install --no-deps vllm==0.33.0        # and what its import asks for
    python benchmarks/vllm_recorder.py --requests 300 --out benchmarks/records/vllm_recorder.json

The scheduler, its KV manager and its request class are vLLM's; tokens come from a hash. Steps are
made in the order of the engine core with a batch queue of two (asynchronous) or of one. What a
recording costs is the time of the same calls with and without it, in one process, in turns.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from engine.steplog.replay import replay
from engine.steplog.vllm_recorder import RecordingScheduler
from engine.steplog.vllm_recording import open_log

BLOCK, EOS = 16, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 1000, "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}  # fmt: skip


def make(kind, folder, is_async, num_blocks):
    """A scheduler of vLLM over one group of full attention."""
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32")
    options = SchedulerConfig(
        max_num_seqs=64, max_num_batched_tokens=512, max_model_len=2048,
        async_scheduling=is_async, is_encoder_decoder=False,
    )  # fmt: skip
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    config = VllmConfig(
        model_config=model, cache_config=cache, scheduler_config=options,
        device_config=DeviceConfig(device="cpu"),
    )  # fmt: skip
    cache.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    kv = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    return kind(
        vllm_config=config, kv_cache_config=kv, block_size=BLOCK, hash_block_size=BLOCK,
        structured_output_manager=StructuredOutputManager(config),
    )  # fmt: skip


def workload(seed, count):
    """Requests, a list for each call."""
    rng, hasher = random.Random(seed), get_request_block_hasher(BLOCK, sha256)
    shared = [rng.randrange(10, 900) for _ in range(256)]
    rows = []
    while sum(map(len, rows)) < count:
        row = []
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
            own = [rng.randrange(10, 900) for _ in range(rng.randint(1, 300))]
            prompt = shared[: rng.choice((0, 0, 64, 250))] + own
            params = SamplingParams(
                max_tokens=rng.randint(1, 120), ignore_eos=rng.random() < 0.5, temperature=0.0
            )
            params.update_from_generation_config({}, EOS)
            name = f"r{sum(map(len, rows)) + len(row)}-{seed}"
            row.append(Request(name, prompt, params, None, block_hasher=hasher))
        rows.append(row)
    return rows


def run(scheduler, rows, is_async, seed):
    """Serves all rows; the time in each `schedule` and `update` together, in seconds."""
    rng, queue, times, call = random.Random(seed), [], [], 0
    while call < len(rows) or scheduler.has_requests() or queue:
        for request in rows[call] if call < len(rows) else ():
            scheduler.add_request(request)
        call += 1
        began = time.perf_counter()
        if scheduler.has_requests():
            queue.append(scheduler.schedule())
            names = queue[-1].num_scheduled_tokens
            # Noted now: by the time of the update the next step has moved on.
            queue[-1].ends = {n: not scheduler.requests[n].is_prefill_chunk for n in names}
        filling = len(queue) <= is_async and scheduler.has_unfinished_requests()
        if queue and not filling:
            output = queue.pop(0)
            names = list(output.num_scheduled_tokens)
            sampled = [_token(rng) if output.ends[name] else [] for name in names]
            result = ModelRunnerOutput(
                req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=sampled, logprobs=None, prompt_logprobs_dict={},
                pooler_output=[],
            )  # fmt: skip
            scheduler.update_from_output(output, result)
        times.append(time.perf_counter() - began)
    return times


def _token(rng):
    return [EOS if rng.random() < 0.02 else rng.randrange(10, 900)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    init_none_hash(sha256)
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(CONFIG))
    found = []
    for is_async in (False, True):
        for num_blocks in (4000, 150):
            plain, recorded, results, preempted = [], [], [], 0
            for seed in range(options.rounds):
                path = folder / f"run{is_async}{num_blocks}{seed}.jsonl"
                os.environ["LOCKSTEP_RECORD"] = str(path)
                kind = AsyncScheduler if is_async else Scheduler
                rows = [workload(seed, options.requests) for _ in range(2)]
                plain += run(make(kind, folder, is_async, num_blocks), rows[0], is_async, seed)
                scheduler = make(RecordingScheduler, folder, is_async, num_blocks)
                recorded += run(scheduler, rows[1], is_async, seed)
                scheduler.shutdown()
                log = open_log(path)
                results.append(replay(log))
                preempted += sum(len(step.preempted) for step in log.recording.steps)
            found.append({
                "async_scheduling": is_async, "num_blocks": num_blocks,
                "requests": sum(result.num_requests for result in results),
                "steps": sum(result.num_steps for result in results),
                "preemptions": preempted,
                "differences": [str(r.difference) for r in results if r.difference],
                "median_call_us": round(statistics.median(plain) * 1e6, 1),
                "recording_us_per_call": round(
                    (statistics.median(recorded) - statistics.median(plain)) * 1e6, 1
                ),
            })  # fmt: skip
            print(json.dumps(found[-1]))
    if options.out:
        from importlib.metadata import version

        record = {
            "command": f"python benchmarks/vllm_recorder.py --requests {options.requests}"
            f" --rounds {options.rounds}",
            "machine": "x86_64, 2 shared cores, loaded", "python": sys.version.split()[0],
            "vllm": version("vllm"), "torch": torch.__version__, "runs": found,
        }  # fmt: skip
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(run["differences"] for run in found))


if __name__ == "__main__":
    sys.exit(main())
