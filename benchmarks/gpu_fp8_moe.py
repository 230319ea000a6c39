# ruff: noqa: B023 (every closure is called before its loop goes on)
"""8-bit products, experts and KV on one GPU: checks, tile sizes, and whole models.

    python3 benchmarks/gpu_fp8_moe.py --out DIR [--only check,products,experts,attention,models]
        [--models NAME:QUANTIZATION:KV,...] [--passes 2] [--step-logs]

Writes DIR/gpu_fp8_moe.json and prints a table last. `--warm I/N` only compiles the I-th part of
the variants, so that N processes share that work through Triton's cache.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton

from engine.kernels.fp8_product import ProductTuning, library_product, triton_product
from engine.kernels.moe_products import GroupedTuning, grouped_product
from engine.kernels.moe_route import fused_top_k, order_by_expert, sum_shares
from engine.kernels.paged_decode import DecodeTuning, paged_decode
from engine.layers.fp8 import FP8, Fp8Matrix, quantise_rows

COPY_TB_S = 4.28
DEVICE = torch.device("cuda")
SECTIONS = ("check", "products", "experts", "attention", "blockwise", "models")
DENSE = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
HIDDEN, WIDTH, EXPERTS, TOP_K = 2048, 768, 128, 8


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=".")
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument(
        "--models", default="qwen3-8b:fp8:fp8,qwen3-30b-a3b::,qwen3-30b-a3b:fp8:fp8"
    )
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--step-logs", action="store_true", help="also write step logs")
    parser.add_argument("--warm")
    parser.add_argument("--commit", default="unknown")
    args = parser.parse_args()
    table: list[str] = []
    record: dict = {
        "commit": args.commit,
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name(0),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
    }
    for section in args.only.split(","):
        started = time.perf_counter()
        try:
            record[section] = RUN[section](args, table)
        except Exception as error:
            traceback.print_exc()
            table.append(f"{section} FAILED {type(error).__name__}: {str(error)[:300]}")
        table.append(f"-- {section}: {time.perf_counter() - started:.0f} s")
        gc.collect()
        torch.cuda.empty_cache()
        if args.warm is None:
            (Path(args.out) / "gpu_fp8_moe.json").write_text(json.dumps(record, indent=1))
    if args.warm is None:
        print("\n".join(["=" * 100, *table]))


def timed(args, number, work):
    """Median microseconds by graph replay; a warming process only runs its share, once."""
    if args.warm is not None:
        part, parts = map(int, args.warm.split("/"))
        if number % parts == part:
            with contextlib.suppress(triton.runtime.errors.OutOfResources):
                work()
        return 1e9
    try:
        work()
        return triton.testing.do_bench_cudagraph(work, rep=15, return_mode="median") * 1e3
    except triton.runtime.errors.OutOfResources:
        return 1e9


def relative(found, expected):
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm())


# Correctness ----------------------------------------------------------------------------------


def check(args, table):
    """‖out - reference‖ / ‖reference‖ with fresh random inputs, on the GPU's own products."""
    if args.warm is not None:
        return {}
    found = {}
    torch.manual_seed(int(time.time()))
    for rows in (1, 40, 300):
        for block in (None, (128, 128)):
            weight, scale = random_matrix((1536, 2048), block)
            x = quantise_rows(torch.randn(rows, 2048, device=DEVICE).bfloat16(), block and 128)
            expected = x.dequantised() @ Fp8Matrix(weight, scale, block, False).plain().T
            out = triton_product(x.values, x.scale, weight, scale, block, torch.bfloat16)
            found[f"product {rows} {block}"] = relative(out, expected)
            if block is None and rows >= 16:
                out = library_product(x.values, x.scale, weight, scale, torch.bfloat16)
                found[f"library product {rows}"] = relative(out, expected)
    for tokens in (1, 64, 600):
        for kind in ("bf16", None, (128, 128)):
            found[f"experts {tokens} {kind}"] = expert_error(tokens, kind)
    found["fp8 kv"] = kv_error()
    table += [f"{name:<40} {value:.2e}" for name, value in found.items()]
    return found


def random_matrix(shape, block):
    weight = (torch.randn(shape, device=DEVICE) * 100).clamp(-440, 440).to(FP8)
    rows, columns = (1, shape[-1]) if block is None else block
    spread = (*shape[:-2], shape[-2] // rows) + (() if block is None else (shape[-1] // columns,))
    return weight, torch.rand(spread, device=DEVICE) * 1e-4 + 1e-5


def expert_error(tokens, kind):
    from engine.kernels.fp8_quantise import fused_quantise_rows
    from engine.kernels.moe_products import block_m_for
    from engine.layers.moe import experts_reference

    x = torch.randn(tokens, HIDDEN, device=DEVICE).bfloat16()
    scores = torch.randn(tokens, EXPERTS, device=DEVICE)
    weights, experts = fused_top_k(scores, TOP_K, True)
    order = order_by_expert(experts, 0, EXPERTS, block_m_for(experts.numel(), EXPERTS))
    if kind == "bf16":
        gate_up = (torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, device=DEVICE) * 0.02).bfloat16()
        down = (torch.randn(EXPERTS, HIDDEN, WIDTH, device=DEVICE) * 0.02).bfloat16()
        rows = grouped_product(x, gate_up, order, TOP_K, None, x.dtype)
        shares = grouped_product(rows, down, order, TOP_K, weights, x.dtype)
        matrices = (gate_up.float(), down.float())
        expected = experts_reference(x.float(), weights, experts, *matrices, 0)
    else:
        pairs = [
            random_matrix(s, kind) for s in ((EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
        ]
        group = kind and 128
        a, scale = fused_quantise_rows(x, group)
        rows = grouped_product(
            a, pairs[0][0], order, TOP_K, None, x.dtype, scale, pairs[0][1], kind
        )
        a, scale = fused_quantise_rows(rows, group)
        shares = grouped_product(
            a, pairs[1][0], order, TOP_K, weights, x.dtype, scale, pairs[1][1], kind
        )
        lists = [[Fp8Matrix(w, s, kind, False) for w, s in zip(*p, strict=True)] for p in pairs]
        expected = experts_reference(x.float(), weights, experts, *lists, 0)
    return relative(sum_shares(shares, experts, 0, EXPERTS), expected)


def kv_error():
    from engine.attention.torch_backend import TorchAttention
    from engine.attention.triton_backend import TritonAttention

    q, cache, meta = attention_inputs(64, 820)
    cache8 = cache.to(FP8)
    triton_out = TritonAttention()
    out = triton_out.forward(q, None, None, cache8, triton_out.prepare(meta), 128**-0.5)
    expected = TorchAttention().forward(q.float(), None, None, cache8, meta, 128**-0.5)
    return relative(out, expected)


def attention_inputs(batch, context, page=16, kv_heads=8, heads=32):
    from engine.attention.base import AttentionMetadata

    width = -(-context // page)
    q = torch.randn(batch, heads, 128, device=DEVICE).bfloat16()
    cache = torch.randn(2, batch * width, page, kv_heads, 128, device=DEVICE).bfloat16()
    tables = torch.randperm(batch * width, device=DEVICE).to(torch.int32).view(batch, width)
    meta = AttentionMetadata(
        slot_mapping=torch.full((batch,), -1, device=DEVICE),
        num_decodes=batch,
        decode_block_tables=tables,
        decode_context_lens=torch.full((batch,), context, dtype=torch.int32, device=DEVICE),
        max_decode_context=4096,
    )
    return q, cache, meta


# Tile sizes -----------------------------------------------------------------------------------

FEW = [
    (16, n, k, w, s) for n in (16, 32, 64) for k, w, s in ((256, 4, 4), (512, 4, 3), (256, 2, 5))
]
SOME = [(64, 64, 128, 4, 4), (64, 128, 128, 4, 4), (64, 32, 256, 4, 3), (64, 64, 256, 4, 3)]
MANY = [(128, 128, 128, 8, 4), (128, 256, 128, 8, 3), (64, 256, 128, 8, 4), (128, 128, 128, 4, 4)]


def products(args, table):
    results, number = {}, 0
    for name, (n, k) in DENSE.items():
        copies = max(2, int(3e8 / (n * k)))
        weights = [torch.randn(n, k, device=DEVICE).to(FP8) for _ in range(copies)]
        scale = torch.rand(n, device=DEVICE)
        plain = [w.bfloat16() for w in weights]
        for rows in (1, 16, 64, 256, 2048):
            x = torch.randn(rows, k, device=DEVICE).bfloat16()
            a = quantise_rows(x)
            ways = {}

            def run(way, x=x):
                for w in range(copies):
                    way(w)

            variants = FEW if rows <= 16 else SOME if rows <= 64 else MANY
            if rows == 64:
                variants = SOME + MANY[2:3]
            for variant in variants:
                tuning = ProductTuning(*variant)
                number += 1
                us = timed(
                    args,
                    number,
                    lambda: run(
                        lambda w: triton_product(
                            a.values, a.scale, weights[w], scale, None, torch.bfloat16, tuning
                        )
                    ),
                )
                ways[str(variant)] = us / copies
            if args.warm is None:
                if rows >= 1:
                    ways["library"] = (
                        timed(
                            args,
                            0,
                            lambda: run(
                                lambda w: library_product(
                                    a.values, a.scale, weights[w], scale, torch.bfloat16
                                )
                            ),
                        )
                        / copies
                    )
                ways["bf16"] = (
                    timed(args, 0, lambda: run(lambda w: torch.nn.functional.linear(x, plain[w])))
                    / copies
                )
                blocks = torch.rand(n // 128, k // 128, device=DEVICE)
                ab = quantise_rows(x, 128)
                base = (64, 64, 128, 4, 4) if rows <= 64 else (128, 128, 128, 8, 3)
                for v in ((16, 32, 128, 4, 5), (16, 16, 128, 4, 6)) if rows <= 16 else (base,):
                    ways[f"block {v}"] = (
                        timed(
                            args,
                            0,
                            lambda: run(
                                lambda w: triton_product(
                                    ab.values,
                                    ab.scale,
                                    weights[w],
                                    blocks,
                                    (128, 128),
                                    torch.bfloat16,
                                    ProductTuning(*v),
                                )
                            ),
                        )
                        / copies
                    )
                floor = max(n * k / COPY_TB_S / 1e6, 2 * rows * n * k / 1.5e9)
                results[f"{name} {rows}"] = {"floor_us": floor, "us": ways}
                best = sorted(ways.items(), key=lambda item: item[1])
                shown = ", ".join(f"{w} {us:.1f}" for w, us in best[:4])
                table.append(
                    f"{name} x{rows}: floor {floor:.1f}; {shown}; "
                    f"lib {ways['library']:.1f} bf16 {ways['bf16']:.1f}"
                )
    return results


GROUPED = [
    (16, [(64, 128, 4, 4), (32, 256, 4, 3), (64, 256, 4, 3), (128, 64, 4, 4), (32, 128, 4, 5)]),
    (32, [(64, 128, 4, 4), (32, 128, 4, 5), (64, 64, 4, 5), (128, 64, 4, 4), (128, 64, 8, 4)]),
    (64, [(64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 4, 4), (128, 64, 8, 4), (64, 128, 8, 3)]),
    (128, [(64, 64, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4), (128, 32, 8, 4), (64, 64, 4, 4)]),
]


def experts(args, table):
    results, number = {}, 0
    scores = [torch.randn(4096, EXPERTS, device=DEVICE) for _ in range(4)]
    for dtype in (torch.bfloat16, FP8):
        wide = dtype.itemsize == 1
        gate_up = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, device=DEVICE).to(dtype)
        down = torch.randn(EXPERTS, HIDDEN, WIDTH, device=DEVICE).to(dtype)
        s1 = torch.rand(EXPERTS, 2 * WIDTH, device=DEVICE) if wide else None
        s2 = torch.rand(EXPERTS, HIDDEN, device=DEVICE) if wide else None
        for tokens in (1, 16, 64, 256, 4096):
            x = torch.randn(tokens, HIDDEN, device=DEVICE).to(dtype)
            rows = torch.randn(tokens * TOP_K, WIDTH, device=DEVICE).to(dtype)
            sx = torch.rand(tokens, 1, device=DEVICE) if wide else None
            sr = torch.rand(tokens * TOP_K, 1, device=DEVICE) if wide else None
            routes = [fused_top_k(s[:tokens].contiguous(), TOP_K, True) for s in scores]
            touched = sum(int(e.unique().numel()) for _, e in routes) / 4
            for gated in (True, False):
                ways = {}
                for block_m, variants in GROUPED:
                    if (tokens <= 16 and block_m > 16) or (tokens > 256 and block_m < 64):
                        continue
                    if tokens in (64, 256) and block_m == 128:
                        continue
                    orders = [order_by_expert(e, 0, EXPERTS, block_m) for _, e in routes]
                    for n, k, w, s in variants:
                        tuning = GroupedTuning(n, k * (2 if wide and k <= 128 else 1), w, s)
                        number += 1

                        def work(orders=orders, tuning=tuning, gated=gated):
                            for order, (weights, _) in zip(orders, routes, strict=True):
                                if gated:
                                    grouped_product(
                                        x,
                                        gate_up,
                                        order,
                                        TOP_K,
                                        None,
                                        torch.bfloat16,
                                        sx,
                                        s1,
                                        tuning=tuning,
                                    )
                                else:
                                    grouped_product(
                                        rows,
                                        down,
                                        order,
                                        TOP_K,
                                        weights,
                                        torch.bfloat16,
                                        sr,
                                        s2,
                                        tuning=tuning,
                                    )

                        try:
                            ways[f"m{block_m} {tuning.block_n},{tuning.block_k},{w},{s}"] = (
                                timed(args, number, work) / 4
                            )
                        except Exception as error:
                            if args.warm is None:
                                table.append(f"m{block_m} {tuning} {type(error).__name__}")
                if args.warm is None:
                    size = (2 if gated else 1) * WIDTH * HIDDEN
                    floor = max(
                        touched * size * dtype.itemsize / COPY_TB_S / 1e6,
                        2 * tokens * TOP_K * size / (1.5e9 if wide else 7.9e8),
                    )
                    name = f"{str(dtype)[6:]} {'gate_up' if gated else 'down'} x{tokens}"
                    results[name] = {"floor_us": floor, "touched": touched, "us": ways}
                    best = sorted(ways.items(), key=lambda item: item[1])[:4]
                    table.append(
                        f"{name}: floor {floor:.1f}; "
                        + ", ".join(f"{w}: {us:.1f}" for w, us in best)
                    )
            if args.warm is None:
                shares = torch.randn(tokens * TOP_K, HIDDEN, device=DEVICE).bfloat16()
                steps = (
                    lambda: [fused_top_k(s[:tokens], TOP_K, True) for s in scores],
                    lambda: [order_by_expert(e, 0, EXPERTS, 32) for _, e in routes],
                    lambda: [sum_shares(shares, e, 0, EXPERTS) for _, e in routes],
                )
                small = [timed(args, 0, step) / 4 for step in steps]
                table.append(
                    f"x{tokens}: top-k {small[0]:.1f}, order {small[1]:.1f}, sum {small[2]:.1f} us"
                )
                results[f"small x{tokens}"] = small
    return results


def attention(args, table):
    results, number = {}, 0
    for batch, context, kv_heads in ((256, 820, 8), (64, 820, 8), (1, 820, 8), (256, 820, 4)):
        q, cache, meta = attention_inputs(batch, context, kv_heads=kv_heads)
        out = torch.empty_like(q)
        for dtype in (torch.bfloat16, FP8):
            stored, ways = cache.to(dtype), {}
            variants = (
                [(64, 4, 3)]
                if dtype == torch.bfloat16
                else [
                    (64, 2, 3),
                    (64, 2, 4),
                    (64, 2, 2),
                    (128, 2, 3),
                    (64, 1, 3),
                    (32, 1, 4),
                    (128, 1, 2),
                    (32, 2, 3),
                    (64, 1, 2),
                ]
            )
            for n, w, s in variants:
                tuning = DecodeTuning(n, w, s, 6 * 132, 128)
                number += 1
                ways[f"{n},{w},{s}"] = timed(
                    args,
                    number,
                    lambda: paged_decode(
                        q,
                        stored,
                        meta.decode_block_tables,
                        meta.decode_context_lens,
                        4096,
                        128**-0.5,
                        out,
                        tuning,
                    ),
                )
            if args.warm is None:
                floor = stored.numel() * dtype.itemsize / COPY_TB_S / 1e6
                name = f"decode {batch} x {context}, {kv_heads} kv heads, {str(dtype)[6:]}"
                results[name] = {"floor_us": floor, "us": ways}
                shown = ", ".join(
                    f"{v}: {us:.1f}" for v, us in sorted(ways.items(), key=lambda i: i[1])
                )
                table.append(f"{name}: floor {floor:.1f}; {shown}")
    return results


def blockwise(args, table):
    """Whether and how fast the library multiplies with a scale per block."""
    if args.warm is not None:
        return {}
    from engine.layers.router import float32_scores

    results = {}
    router = torch.randn(128, 2048, device=DEVICE).bfloat16()
    for rows in (1, 64, 256, 4096):
        x = torch.randn(rows, 2048, device=DEVICE).bfloat16()
        us = timed(args, 0, lambda x=x: float32_scores(x, router))
        table.append(f"router scores x{rows}: {us:.1f} us")
    for rows in (64, 256, 2048):
        for name, (n, k) in DENSE.items():
            w = (torch.randn(n, k, device=DEVICE) * 50).to(FP8)
            scale = torch.rand(n // 128, k // 128, device=DEVICE)
            a = quantise_rows(torch.randn(rows, k, device=DEVICE).bfloat16(), 128)
            a_scale = a.scale.t().contiguous().t()
            expected = a.dequantised() @ Fp8Matrix(w, scale, (128, 128), False).plain().T

            def work(a=a, w=w, scale=scale, a_scale=a_scale):
                return torch._scaled_mm(
                    a.values, w.t(), scale_a=a_scale, scale_b=scale.t(), out_dtype=torch.bfloat16
                )

            try:
                error = relative(work(), expected)
                results[f"{name} {rows}"] = us = timed(args, 0, work)
                table.append(f"blockwise {name} x{rows}: {us:.1f} us, error {error:.1e}")
            except Exception as failure:
                table.append(f"blockwise {name} x{rows}: {str(failure)[:160]}")
    return results


# Whole models ---------------------------------------------------------------------------------


def models(args, table):
    if args.warm is not None:
        return {}
    return {case: whole_model(case, args, table) for case in args.models.split(",")}


def whole_model(case, args, table):
    from engine.commands.bench_common import shape_folder
    from engine.commands.bench_throughput import make_workload, measure
    from engine.llm import LLM
    from engine.sampling_params import SamplingParams

    name, quantization, kv = case.split(":")
    options = {
        "load_format": "dummy",
        "async_scheduling": True,
        "max_model_len": 4096,
        "max_num_batched_tokens": 16384,
        "quantization": quantization or None,
        "kv_cache_dtype": kv or "auto",
    }
    if args.step_logs:
        log_name = case.replace(":", "_").rstrip("_")
        options["step_log"] = str(Path(args.out) / f"steps_{log_name}.jsonl.gz")
    started = time.perf_counter()
    try:
        with shape_folder(None, name) as folder, LLM(folder, **options) as llm:
            start_up_s = time.perf_counter() - started
            found = measure(llm, make_workload(), args.passes)
            found["options"], found["start_up_s"] = options, start_up_s
            one = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=256)
            times = []
            for number in range(3):
                prompt = [(number * 1009 + 31 * k) % 9973 for k in range(32)]
                (output,) = llm.generate([prompt], one, use_tqdm=False)
                metrics = output.metrics
                times.append((metrics.e2e_ms - metrics.ttft_ms) / 255)
            found["one_stream_ms"] = sorted(times)[1]
    except Exception as error:
        traceback.print_exc()
        table.append(f"{case} FAILED {type(error).__name__}: {str(error)[:300]}")
        return {"error": repr(error)}
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    rates = ", ".join(f"{p['output_tokens_per_s']:,.0f}" for p in found["passes"])
    peak = (found.get("peak_memory_bytes") or 0) / 2**30
    table.append(
        f"{case}: {found['output_tokens_per_s']:,.0f} tok/s ({rates}), one stream "
        f"{found['one_stream_ms']:.2f} ms, start {start_up_s:.1f} s, peak {peak:.1f} GiB"
    )
    for kind, step in found["passes"][-1]["steps"].items():
        table.append(
            f"    {kind:<12} {step['steps']:>5} steps {step['total_s']:7.3f} s, median ms: "
            f"{step['duration_ms_p50']:7.3f} device {step['device_ms_p50']:7.3f}"
        )
    return found


RUN = {
    "check": check,
    "products": products,
    "experts": experts,
    "attention": attention,
    "blockwise": blockwise,
    "models": models,
}

if __name__ == "__main__":
    main()
