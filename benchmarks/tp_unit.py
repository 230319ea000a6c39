"""One run of gpu_tp.py: an engine of one model at one tensor-parallel size.

`speed` measures throughput, profiles steps and, with several ranks, kills one in mid-run.
`decisions` runs a workload that preempts and shares prefixes, and writes its step log.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
import traceback
from multiprocessing import resource_tracker
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from leftovers import Leftovers, gpu_memory_mib, is_running, wait_for_memory

from engine.sampling_params import SamplingParams
from engine.worker.probe import START_PROFILE, STATE_DIGEST, STOP_PROFILE, read_profile

LARGEST_ID = 10000


def main():
    parser = argparse.ArgumentParser()
    for name in ("--kind", "--model", "--part", "--device"):
        parser.add_argument(name, required=True)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--gpus", default="")
    parser.add_argument("--policies", default="mixed")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.gpus = [gpu for gpu in args.gpus.split(",") if gpu]
    resource_tracker.ensure_running()  # so that it does not count as left behind
    from engine.commands.bench_common import shape_folder

    with shape_folder(None, args.model) as args.folder:
        {"speed": speed, "decisions": decisions}[args.kind](args, Part(args.part))


class Part:
    """The record, saved after every measurement; a failed one becomes an error in its place."""

    def __init__(self, path):
        self._path = Path(path)
        self._record = {}

    def add(self, name, work):
        try:
            self._record[name] = work()
        except Exception as error:
            traceback.print_exc()
            self._record[name] = {"error": f"{type(error).__name__}: {str(error)[-2000:]}"}
        self._path.write_text(json.dumps(self._record, indent=1))

    def has_failed(self, name):
        return "error" in self._record[name]


def start(args, **options):
    from engine.llm import LLM

    common = dict(
        load_format="dummy",
        device=args.device,
        tensor_parallel_size=args.tp,
        attention_backend="triton" if args.device == "cuda" else "torch",
        block_size=16,
        worker_timeout_s=100.0,
    )
    return LLM(args.folder, **{**common, **options})


# Speed -------------------------------------------------------------------------------------------


def speed(args, part):
    memory_mib = gpu_memory_mib(args.gpus)
    before = Leftovers()
    engine = []

    def throughput():
        from engine.commands.bench_throughput import make_workload, measure

        begin = time.perf_counter()
        engine.append(start_fast(args))
        start_up_s = time.perf_counter() - begin
        workload = make_workload(6, 0, 4, 16) if args.tiny else make_workload()
        found = measure(engine[0], workload, args.passes)
        found["options"]["model"] = args.model  # not the folder that is gone afterwards
        return {"start_up_s": start_up_s, **found}

    part.add("throughput", throughput)
    rows, context, steps = (6, 20, 4) if args.tiny else (256, 820, 16)
    part.add("profile_decode", lambda: profile_decode(engine[0], rows, context, steps))
    prompts, length = (4, 20) if args.tiny else (16, 1000)
    part.add("profile_prefill", lambda: profile_prefill(engine[0], prompts, length))
    if args.tp > 1:

        def kill_one():
            if part.has_failed("profile_prefill"):  # the engine may be lost
                for llm in engine:
                    llm.close()
                engine[:] = [start_fast(args, enforce_eager=True)]
            return kill(args, engine[0], before, memory_mib)

        part.add("kill", kill_one)
    for llm in engine:
        llm.close()


def start_fast(args, **options):
    """The engine of the throughput workload."""
    sizes = dict(max_model_len=4096, max_num_seqs=256, max_num_batched_tokens=16384)
    if args.tiny:
        sizes = dict(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=128)
    return start(args, policy="mixed", async_scheduling=True, **{**sizes, **options})


def profile_decode(llm, num_rows, context, num_steps):
    """Steps with the same rows throughout, each at about the same context."""
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=200)
    ids = llm.add_requests(token_prompts(llm, num_rows, context, 31), params)
    while llm.scheduler.num_waiting or any(plan.chunks for plan in llm.scheduler.open_plans):
        llm.step()
    for _ in range(4):
        llm.step()
    begin = time.perf_counter()
    for _ in range(num_steps):
        llm.step()
    step_ms = (time.perf_counter() - begin) * 1e3 / num_steps
    llm.executor.ask(START_PROFILE)
    for _ in range(num_steps):
        llm.step()
    # As many steps were launched since the start as were run: one was under way at both ends.
    answers = llm.executor.ask(STOP_PROFILE)
    for request_id in ids:
        llm.abort(request_id)
    return {
        "rows": num_rows,
        "context": context,
        **profile_record(answers, num_steps, step_ms),
    }


def profile_prefill(llm, num_prompts, length):
    """One step that computes whole prompts and nothing else."""
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=1)
    begin = time.perf_counter()
    llm.generate(token_prompts(llm, num_prompts, length, 17), params, use_tqdm=False)
    step_ms = (time.perf_counter() - begin) * 1e3
    steps = []
    llm.on_step = lambda events: steps.append(events.plan.num_entries)
    llm.executor.ask(START_PROFILE)
    llm.generate(token_prompts(llm, num_prompts, length, 23), params, use_tqdm=False)
    answers = llm.executor.ask(STOP_PROFILE)
    llm.on_step = None
    num_steps = sum(1 for entries in steps if entries)
    tokens = {"tokens": num_prompts * length}
    return {**tokens, **profile_record(answers, num_steps, step_ms)}


def token_prompts(llm, count, length, stride):
    """Prompts that share no prefix with one another nor with those of another stride."""
    size = min(llm.model_config.vocab_size, LARGEST_ID)
    return [[(i + stride * (k + 1)) % size for k in range(length)] for i in range(count)]


def profile_record(answers, num_steps, step_ms):
    ranks = []
    for profile in map(read_profile, answers):
        collective_ms = profile.collective_ms / num_steps
        ranks.append(
            {
                "span_ms_per_step": profile.span_ms / num_steps,
                "busy_ms_per_step": profile.busy_ms / num_steps,
                "collective_ms_per_step": collective_ms,
                "share_of_span": share(profile.collective_ms, profile.span_ms),
                "share_of_busy": share(profile.collective_ms, profile.busy_ms),
                "share_of_step": collective_ms / step_ms,
                "kernels": [
                    {
                        "name": kernel.name,
                        "ms_per_step": kernel.total_ms / num_steps,
                        "runs_per_step": kernel.count / num_steps,
                    }
                    for kernel in profile.kernels[:24]
                ],
            }
        )
    return {"steps": num_steps, "step_ms": step_ms, "ranks": ranks}


def share(part_ms, whole_ms):
    if not whole_ms:
        raise AssertionError("the profiler saw no kernel")
    return part_ms / whole_ms


# Loss of a rank ----------------------------------------------------------------------------------


def kill(args, llm, before, memory_mib):
    """SIGKILL to a rank in the middle of `generate`, and what is left of the engine then."""
    from engine.step.loop import StepFailed

    rank = args.tp - 1 if args.model.endswith("0.6b") else 0
    pids = llm.executor.worker_pids
    full_mib = gpu_memory_mib(args.gpus)
    steps = []
    at = []

    def strike(events):
        steps.append(events.plan.num_entries)
        if len(steps) == 12:
            os.kill(pids[rank], signal.SIGKILL)
            at.append(time.perf_counter())

    llm.on_step = strike
    count, length = (6, 20) if args.tiny else (64, 300)
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=150)
    try:
        llm.generate(token_prompts(llm, count, length, 41), params, use_tqdm=False)
    except StepFailed as error:
        error_s = time.perf_counter() - at[0]
        message = str(error)
    else:
        raise AssertionError("generate went on without a rank")
    freed_s, end_mib = wait_for_memory(args.gpus, memory_mib, at[0])
    found = {
        "rank": rank,
        "error_s": error_s,
        "message": message[:300],
        "memory_start_mib": memory_mib,
        "memory_full_mib": full_mib,
        "memory_end_mib": end_mib,
        "memory_freed_s": freed_s,
        "left_processes": sum(map(is_running, pids)) + len(before.new_children()),
        "left_shared_memory": len(before.new_files()),
    }
    problems = [name for name in ("left_processes", "left_shared_memory") if found[name]]
    problems += ["error_s"] * (error_s > 30) + ["memory"] * (freed_s is None)
    return found | ({"error": f"left behind: {problems}: {found}"} if problems else {})


# Decisions ---------------------------------------------------------------------------------------


def decisions(args, part):
    for policy in args.policies.split(","):
        part.add(policy, lambda policy=policy: run_decisions(args, policy))


def run_decisions(args, policy):
    """A pool so small that requests are preempted, and prompts that share their first tokens."""
    name = f"steps-{args.model}-tp{args.tp}-{policy}.jsonl"
    log = Path(args.part).with_name(name)
    count, blocks, longest = (20, 36, 40) if args.tiny else (64, 200, 200)
    begin = time.perf_counter()
    llm = start(
        args,
        policy=policy,
        async_scheduling=policy == "mixed",
        num_kvcache_blocks=blocks,
        max_model_len=512,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        step_log=str(log),
        debug=True,
    )
    found = {"start_up_s": time.perf_counter() - begin, "log": name}
    try:
        found |= drive(llm, decision_prompts(llm, count, longest), longest)
    finally:
        begin = time.perf_counter()
        llm.close()
        found["close_s"] = time.perf_counter() - begin
    found["replay"] = replayed(log)
    wrong = [name for name in ("preemptions", "cached_tokens", "digests_equal") if not found[name]]
    if wrong or found["replay"] not in ("no difference", "not run here"):
        found["error"] = f"wrong: {wrong}, replay: {found['replay']}"
    return found


def decision_prompts(llm, count, longest):
    rng = random.Random(1)
    size = min(llm.model_config.vocab_size, LARGEST_ID)
    heads = [[rng.randrange(size) for _ in range(longest // 2)] for _ in range(3)]
    return [
        rng.choice([[], *heads])
        + [rng.randrange(size) for _ in range(rng.randint(8, longest // 2))]
        for _ in range(count)
    ]


def drive(llm, prompts, longest):
    """Runs the requests, asking all ranks for their tables on the way and at the end."""
    params = [
        SamplingParams(
            temperature=0.6 * (i % 2), ignore_eos=True, max_tokens=longest // (1 + i % 3)
        )
        for i in range(len(prompts))
    ]
    steps, outputs, digests = [], [], []
    llm.on_step = lambda events: steps.append(events.plan.num_entries)
    llm.add_requests(prompts, params)
    while llm.has_unfinished_requests:
        outputs += llm.step()
        if len(steps) % 10 == 1:
            digests.append(llm.executor.ask(STATE_DIGEST))
    digests.append(llm.executor.ask(STATE_DIGEST))
    return {
        "requests": len(outputs),
        "num_steps": len(steps),
        "preemptions": sum(output.metrics.num_preemptions for output in outputs),
        "cached_tokens": sum(output.metrics.num_cached_tokens for output in outputs),
        "digests_compared": len(digests),
        "digests_equal": all(len(set(per_rank)) == 1 for per_rank in digests),
        "digests_different_over_time": len({per_rank[0] for per_rank in digests}),
        "tokens_first_request": list(outputs[0].outputs[0].token_ids)[:16],
    }


def replayed(log):
    """The log through a fresh kernel, where the simulator can be imported."""
    try:
        from engine.steplog.replay import replay
        from engine.steplog.vllm_recording import open_log
    except ModuleNotFoundError:
        return "not run here"
    result = replay(open_log(log))
    return "no difference" if result.difference is None else str(result.difference)


if __name__ == "__main__":
    main()
