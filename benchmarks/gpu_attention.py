"""Times the attention kernels on a GPU at the sizes of an offline batch, beside FlashAttention-2.

    python benchmarks/gpu_attention.py [--out FILE] [--sweep]

Reports microseconds (median) and the rate of KV bytes (decode) or FLOPs (prefill); `--sweep` tries
launch parameters. Each result is first compared with attention in float32.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from functools import partial

import torch
import triton
from triton.testing import do_bench

from engine.attention.base import AttentionMetadata
from engine.attention.flash_backend import FlashAttention
from engine.attention.torch_backend import TorchAttention
from engine.kernels import paged_decode as decode
from engine.kernels import paged_prefill as prefill

KV_HEADS, HEAD_DIM = 8, 128
DECODES = [(256, 820), (64, 820), (16, 4096), (1, 4096)]


def decode_case(batch, context, page, heads):
    """Random cache, a random block table, and one query per sequence."""
    pages = triton.cdiv(context, page)
    cache = torch.randn(
        2, batch * pages, page, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda"
    )
    table = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
    lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    q = torch.randn(batch, heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    slots = torch.full((batch,), -1, device="cuda")
    return q, cache, AttentionMetadata(slots, batch, table, lens, context)


def error(out, q, cache, meta, scale):
    """Relative error against attention in float32."""
    truth = TorchAttention().forward(q.float(), None, None, cache.float(), meta, scale)
    return ((out.float() - truth).norm() / truth.norm()).item()


def decode_tunings(sweep):
    default = decode.default_tuning(HEAD_DIM, torch.bfloat16, decode.num_sms(torch.device("cuda")))
    if not sweep:
        return [default]
    sms = decode.num_sms(torch.device("cuda"))
    return [
        decode.DecodeTuning(block, warps, stages, per_sm * sms, 128)
        for block, warps, stages, per_sm in itertools.product((32, 64, 128), (4,), (2, 3, 4), (6,))
    ]


def decode_once(q, cache, meta, scale, out, tuning):
    tables, lens = meta.decode_block_tables, meta.decode_context_lens
    decode.paged_decode(q, cache, tables, lens, 4096, scale, out, tuning)


def bench_decode(results, sweep, heads):
    scale = HEAD_DIM**-0.5
    for (batch, context), page in itertools.product(DECODES, (16, 256)):
        q, cache, meta = decode_case(batch, context, page, heads)
        num_bytes = 2 * batch * context * KV_HEADS * HEAD_DIM * 2
        out = torch.empty_like(q)
        rows = []
        for tuning in decode_tunings(sweep):
            run = partial(decode_once, q, cache, meta, scale, out, tuning)
            try:
                run()
                rows.append((do_bench(run, return_mode="median") * 1e3, tuning))
            except Exception as failure:
                print("failed", tuning, str(failure)[:200])
        best_us, best = min(rows, key=lambda row: row[0])
        decode_once(q, cache, meta, scale, out, best)
        entry = {
            "case": f"decode b{batch} ctx{context} page{page} heads{heads}",
            "us": round(best_us, 1),
            "tb_per_s": round(num_bytes / best_us / 1e6, 2),
            "error": round(error(out, q, cache, meta, scale), 5),
            "tuning": str(best),
        }
        if page == 256 and have_flash():
            flash_us = do_bench(
                lambda q=q, cache=cache, meta=meta: FlashAttention().forward(
                    q, None, None, cache, meta, scale
                ),
                return_mode="median",
            )
            entry["flash_us"] = round(flash_us * 1e3, 1)
        if sweep:
            entry["top"] = [f"{us:.0f} {t}" for us, t in sorted(rows, key=lambda r: r[0])[:4]]
        results.append(entry)
        print(json.dumps(entry))


def bench_prefill(results, sweep, heads):
    scale = HEAD_DIM**-0.5
    for page in (16, 256):
        batch, length = 16, 1024
        pages = length // page
        cache = torch.randn(
            2, batch * pages, page, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda"
        )
        table = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
        lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        bounds = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device="cuda")
        q = torch.randn(batch * length, heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        empty = torch.empty(0, dtype=torch.int32, device="cuda")
        slots = torch.full((batch * length,), -1, device="cuda")
        meta = AttentionMetadata(slots, 0, empty, empty, 0, bounds, table, lens, length, length)
        out = torch.empty_like(q)
        tunings = [prefill.default_tuning(HEAD_DIM, torch.bfloat16)]
        if sweep:
            tunings = [
                prefill.PrefillTuning(m, n, warps, stages)
                for m, n, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (2, 3))
            ]
        rows = []
        for tuning in tunings:
            run = partial(
                prefill.paged_prefill,
                q,
                cache,
                table,
                lens,
                bounds,
                length,
                length,
                scale,
                out,
                tuning,
            )

            try:
                run()
                rows.append((do_bench(run, return_mode="median") * 1e3, tuning))
            except Exception as failure:
                print("failed", tuning, str(failure)[:200])
        best_us, best = min(rows, key=lambda row: row[0])
        prefill.paged_prefill(q, cache, table, lens, bounds, length, length, scale, out, best)
        flops = 4 * batch * heads * HEAD_DIM * length * (length + 1) / 2
        entry = {
            "case": f"prefill {batch}x{length} page{page} heads{heads}",
            "us": round(best_us, 1),
            "tflops": round(flops / best_us / 1e6, 1),
            "error": round(error(out, q, cache, meta, scale), 5),
            "tuning": str(best),
        }
        if page == 256 and have_flash():
            flash_us = do_bench(
                lambda q=q, cache=cache, meta=meta: FlashAttention().forward(
                    q, None, None, cache, meta, scale
                ),
                return_mode="median",
            )
            entry["flash_us"] = round(flash_us * 1e3, 1)
        if sweep:
            entry["top"] = [f"{us:.0f} {t}" for us, t in sorted(rows, key=lambda r: r[0])[:4]]
        results.append(entry)
        print(json.dumps(entry))


def have_flash():
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        return False
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="write the results as JSON to this file")
    parser.add_argument("--sweep", action="store_true", help="try launch parameters")
    args = parser.parse_args()
    torch.manual_seed(0)
    results: list[dict[str, object]] = []
    for heads in (16, 32):
        bench_decode(results, args.sweep and heads == 16, heads)
        bench_prefill(results, args.sweep and heads == 16, heads)
    record = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": " ".join(sys.argv),
        "results": results,
    }
    if args.out:
        with open(args.out, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
