"""First look at one GPU: are the kernels right, how fast is the engine, where does a step go?

    python3 benchmarks/gpu_smoke.py --out DIR [--only kernels,graphs,throughput,profile]

Writes DIR/gpu_smoke.json and prints a short table last. A section that fails is reported and the
next one runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from engine.attention.base import AttentionMetadata
from engine.attention.select import select_backend
from engine.commands.bench_common import current_commit, shape_folder
from engine.commands.bench_throughput import make_workload, run
from engine.llm import LLM
from engine.models.presets import PRESETS
from engine.sampling_params import SamplingParams

SECTIONS = ("kernels", "graphs", "throughput", "profile")
BLOCK_SIZES = {"flash_attn": 256, "triton": 16}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=".")
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--models", default="qwen3-0.6b,qwen3-8b")
    parser.add_argument("--backends", default="flash_attn,triton")
    parser.add_argument("--policies", default="mixed,prefill_first")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--sync", action="store_true", help="also measure without async scheduling")
    args = parser.parse_args()
    table: list[str] = []
    record: dict = {
        "commit": current_commit(),
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "sections": {},
    }
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    for section in args.only.split(","):
        started = time.perf_counter()
        RUN[section](args, record["sections"], table)
        table.append(f"-- {section}: {time.perf_counter() - started:.0f} s")
        (out / "gpu_smoke.json").write_text(json.dumps(record, indent=1))
    print("\n".join(["=" * 100, *table]))


def attempt(table, name, work):
    """Runs one measurement; a failure becomes a line of the table."""
    try:
        result = work()
    except Exception as error:
        traceback.print_exc()
        table.append(f"{name:<46} FAILED {type(error).__name__}: {str(error)[:160]}")
        result = {"error": repr(error)}
    gc.collect()
    torch.cuda.empty_cache()
    return result


# Kernels against the reference -----------------------------------------------------------------


def kernels(args, sections, table):
    sections["kernels"] = results = {}
    for backend in args.backends.split(","):
        for heads, kv_heads, dim in ((16, 8, 128), (32, 8, 128), (9, 3, 64)):
            name = f"attention {backend} {heads}/{kv_heads}x{dim}"

            def work(backend=backend, shape=(heads, kv_heads, dim), name=name):
                errors = attention_errors(backend, *shape)
                table.append(f"{name:<46} max error {errors['max']:.2e} (rms {errors['rms']:.2e})")
                return errors

            results[name] = attempt(table, name, work)
    for name, check in (("fused layers", layer_errors), ("fused race", race_mismatches)):

        def work(name=name, check=check):
            found = check()
            table.append(f"{name:<46} {found}")
            return found

        results[name] = attempt(table, name, work)


def attention_errors(name, num_heads, num_kv_heads, head_dim):
    """bf16 output of a mixed step against the reference, which computes in float32."""
    torch.manual_seed(0)
    device, dtype, block = torch.device("cuda"), torch.bfloat16, BLOCK_SIZES[name]
    contexts = [1, 17, 300, 900, 2048]
    chunks = [(0, 5), (0, 257), (300, 100), (1000, 33)]  # first position, length
    width = 4096 // block
    num_seqs = len(contexts) + len(chunks)
    num_blocks = num_seqs * width
    cache = torch.randn(2, num_blocks, block, num_kv_heads, head_dim, device=device).to(dtype)
    tables = torch.randperm(num_blocks, device=device).to(torch.int32).view(num_seqs, width)
    rows = [(i, c - 1) for i, c in enumerate(contexts)]
    for i, (first, length) in enumerate(chunks, len(contexts)):
        rows += [(i, first + k) for k in range(length)]
    mapping = [int(tables[i, p // block]) * block + p % block for i, p in rows]
    lengths = [length for _, length in chunks]
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    meta = AttentionMetadata(
        slot_mapping=torch.tensor(mapping, device=device),
        num_decodes=len(contexts),
        decode_block_tables=tables[: len(contexts)],
        decode_context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        max_decode_context=4096,
        cu_seqlens_q=ends,
        chunk_block_tables=tables[len(contexts) :],
        chunk_context_lens=torch.tensor(
            [first + length for first, length in chunks], dtype=torch.int32, device=device
        ),
        max_seqlen_q=max(lengths),
        max_seqlen_k=max(first + length for first, length in chunks),
    )
    q = torch.randn(len(rows), num_heads, head_dim, device=device).to(dtype)
    k, v = (torch.randn(len(rows), num_kv_heads, head_dim, device=device).to(dtype) for _ in "kv")
    outputs = []
    for backend in (name, "torch"):
        attention = select_backend(backend, head_dim, block, dtype, device)
        ready = attention.prepare(meta)
        outputs.append(attention.forward(q, k, v, cache.clone(), ready, head_dim**-0.5).float())
    difference = (outputs[0] - outputs[1]).abs()
    assert difference.max() < 3e-2, f"attention is wrong: {difference.max()}"
    return {"max": difference.max().item(), "rms": difference.pow(2).mean().sqrt().item()}


def layer_errors():
    """Hidden states of one prefill with fused and with plain layers."""
    from engine.distributed.group import TpGroup
    from engine.models.build import build_model
    from engine.models.config import resolve_model_config
    from engine.models.loader import init_dummy_weights

    raw = {**PRESETS["qwen3-0.6b"], "num_hidden_layers": 4, "vocab_size": 1024}
    config = resolve_model_config(raw, ())
    device, dtype, length, block = torch.device("cuda"), torch.bfloat16, 300, 16
    width = -(-length // block)
    meta = AttentionMetadata(
        slot_mapping=torch.arange(length, device=device),
        num_decodes=0,
        decode_block_tables=torch.zeros(0, width, dtype=torch.int32, device=device),
        decode_context_lens=torch.zeros(0, dtype=torch.int32, device=device),
        max_decode_context=0,
        cu_seqlens_q=torch.tensor([0, length], dtype=torch.int32, device=device),
        chunk_block_tables=torch.arange(width, dtype=torch.int32, device=device)[None],
        chunk_context_lens=torch.tensor([length], dtype=torch.int32, device=device),
        max_seqlen_q=length,
        max_seqlen_k=length,
    )
    ids = torch.arange(length, device=device)
    hidden = []
    for fused in (True, False):
        backend = select_backend("triton", config.head_dim, block, dtype, device)
        model = build_model(config, TpGroup(), backend, dtype, device, fused=fused)
        init_dummy_weights(model, 0)
        caches = [
            torch.zeros(2, width, block, config.num_kv_heads, config.head_dim, dtype=dtype).to(
                device
            )
            for _ in range(config.num_layers)
        ]
        with torch.inference_mode():
            hidden.append(model(ids, ids, caches, meta).float())
    difference = (hidden[0] - hidden[1]).abs()
    scale = hidden[1].abs().max()
    return {"max": difference.max().item(), "of": scale.item()}


def race_mismatches():
    """Rows in which the fused race and the reference pick other tokens."""
    from engine.kernels.race import fused_race
    from engine.sampler import race

    torch.manual_seed(0)
    logits = torch.randn(256, 151936, device="cuda").to(torch.bfloat16)
    temperatures = torch.full((256,), 0.6, device="cuda")
    temperatures[::4] = 0.0
    seeds = torch.arange(256, device="cuda") * 7919
    positions = torch.arange(256, device="cuda") + 100
    found = fused_race(logits, temperatures, seeds, positions)
    wanted = race(logits, temperatures, seeds, positions)
    return {"mismatches": int((found != wanted).sum()), "rows": 256}


# Graphs against eager ----------------------------------------------------------------------------


def graphs(args, sections, table):
    sections["graphs"] = results = {}
    reference = None
    for backend in args.backends.split(","):
        for eager, asynchronous in ((True, False), (False, False), (False, True)):
            name = f"tokens {backend} {'eager' if eager else 'graphs'}"
            name += " async" if asynchronous else ""

            def work(backend=backend, eager=eager, asynchronous=asynchronous):
                return short_tokens(backend, eager, asynchronous)

            tokens = attempt(table, name, work)
            if isinstance(tokens, dict):
                results[name] = tokens
                continue
            reference = reference or tokens
            same = sum(a == b for a, b in zip(tokens, reference, strict=True))
            prefix = [common_prefix(a, b) for a, b in zip(tokens, reference, strict=True)]
            results[name] = {"equal": same, "common_prefix": prefix}
            table.append(f"{name:<46} {same}/{len(tokens)} equal to the first, prefixes {prefix}")


def short_tokens(backend, eager, asynchronous):
    with (
        shape_folder(None, "qwen3-0.6b") as folder,
        LLM(
            folder,
            load_format="dummy",
            attention_backend=backend,
            block_size=BLOCK_SIZES[backend],
            max_model_len=1024,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            num_kvcache_blocks=8 * 1024 // BLOCK_SIZES[backend],
            enforce_eager=eager,
            async_scheduling=asynchronous,
        ) as llm,
    ):
        prompts = [[(7 * i + k) % 5000 for k in range(60 + 40 * i)] for i in range(8)]
        params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=48)] * 4
        params += [SamplingParams(temperature=0.8, seed=3, ignore_eos=True, max_tokens=48)] * 4
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, False)]


def common_prefix(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


# Throughput ----------------------------------------------------------------------------------


def throughput(args, sections, table):
    sections["throughput"] = results = {}
    workload = make_workload()
    for model in args.models.split(","):
        for backend in args.backends.split(","):
            for policy in args.policies.split(","):
                for asynchronous in (True, False) if args.sync else (True,):
                    name = f"{model} {backend} {policy} {'async' if asynchronous else 'sync'}"
                    options = {
                        "load_format": "dummy",
                        "attention_backend": backend,
                        "block_size": BLOCK_SIZES[backend],
                        "policy": policy,
                        "async_scheduling": asynchronous,
                        "max_model_len": 4096,
                        "max_num_seqs": 256,
                        "max_num_batched_tokens": 16384,
                    }

                    def work(model=model, options=options, name=name):
                        with shape_folder(None, model) as folder:
                            found = run({**options, "model": folder}, workload, args.passes)
                        table.extend(throughput_lines(name, found))
                        return found

                    results[name] = attempt(table, name, work)


def throughput_lines(name, found):
    last = found["passes"][-1]
    memory = (found["peak_memory_bytes"] or 0) / 2**30
    rates = ", ".join(f"{p['output_tokens_per_s']:,.0f}" for p in found["passes"])
    yield (
        f"{name:<46} {found['output_tokens_per_s']:>8,.0f} tok/s ({rates}), "
        f"start {found['start_up_s']:.1f} s, peak {memory:.1f} GiB"
    )
    for kind, step in last["steps"].items():
        yield (
            f"    {kind:<14} {step['steps']:>5} steps {step['total_s']:7.3f} s, "
            f"median ms: step {step['duration_ms_p50']:7.3f} device {step['device_ms_p50']:7.3f} "
            f"host {step['host_ms_p50']:6.3f}"
        )


# Where a decode step goes ---------------------------------------------------------------------


def profile(args, sections, table):
    sections["profile"] = results = {}
    for model in args.models.split(","):
        for backend in args.backends.split(","):
            name = f"{model} {backend}"

            def work(model=model, backend=backend, name=name):
                found = profile_decode(model, backend)
                table.append(
                    f"decode of 256 rows, {name}: {found['step_ms']:.3f} ms a step, "
                    f"device busy {found['device_busy_ms']:.3f} ms"
                )
                for kernel in found["kernels"][:16]:
                    table.append(
                        f"    {kernel['ms_per_step']:7.3f} ms {kernel['launches_per_step']:6.1f}x "
                        f"{kernel['name'][:100]}"
                    )
                return found

            results[name] = attempt(table, name, work)


def profile_decode(model, backend, num_rows=256, context=820, num_steps=8):
    """Kernels of one decode step with all contexts about `context`."""
    with (
        shape_folder(None, model) as folder,
        LLM(
            folder,
            load_format="dummy",
            attention_backend=backend,
            block_size=BLOCK_SIZES[backend],
            max_model_len=4096,
            max_num_seqs=num_rows,
            max_num_batched_tokens=16384,
            async_scheduling=True,
            enable_prefix_caching=False,
        ) as llm,
    ):
        prompts = [[(i + 31 * k) % 10000 for k in range(context)] for i in range(num_rows)]
        llm.add_requests(prompts, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=200))
        while llm.scheduler.num_waiting or any(p.chunks for p in llm.scheduler.open_plans):
            llm.step()
        for _ in range(4):
            llm.step()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(num_steps):
            llm.step()
        step_ms = (time.perf_counter() - begin) * 1e3 / num_steps
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(num_steps):
                llm.step()
            torch.cuda.synchronize()
    totals = defaultdict(lambda: [0.0, 0])
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals[event.name][0] += event.device_time_total / 1e3
            totals[event.name][1] += 1
    # The window holds one step more or less than was asked for; sampling runs once a step.
    steps = max(1, max((n for name, (_, n) in totals.items() if "race" in name), default=num_steps))
    kernels_found = sorted(
        (
            {"name": name, "ms_per_step": ms / steps, "launches_per_step": count / steps}
            for name, (ms, count) in totals.items()
        ),
        key=lambda item: -item["ms_per_step"],
    )
    return {
        "step_ms": step_ms,
        "device_busy_ms": sum(item["ms_per_step"] for item in kernels_found),
        "kernels": kernels_found[:60],
    }


RUN = {"kernels": kernels, "graphs": graphs, "throughput": throughput, "profile": profile}

if __name__ == "__main__":
    main()
