"""Compiles every kernel for an H100-class GPU in bfloat16, without a GPU; prints one line each.

The interpreter accepts more than the compiler does. Run as a script of its own, since the kernels
must not be defined for the interpreter.
"""

from __future__ import annotations

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 227 * 1024
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Compiling:
    """Stands in for `kernel[grid]`: compiles for the arguments instead of launching."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __call__(self, *args, num_warps=4, num_stages=3, launch_pdl=False, **constants):
        params = self.kernel.params
        values = dict(zip((p.name for p in params), args, strict=False)) | constants
        signature, fixed, attributes = {}, {}, {}
        for i, param in enumerate(params):
            value = values[param.name]
            if param.is_constexpr or (value == 1 if isinstance(value, int) else False):
                signature[param.name], fixed[(i,)] = "constexpr", value
                continue
            if isinstance(value, torch.Tensor):
                signature[param.name] = POINTERS[value.dtype]
                aligned = not param.do_not_specialize_on_alignment
            else:
                signature[param.name] = "i32" if isinstance(value, int) else "fp32"
                aligned = isinstance(value, int) and value % 16 == 0 and not param.do_not_specialize
            if aligned:
                attributes[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, fixed, attributes)
        options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": launch_pdl}
        compiled = compile_kernel(source, target=TARGET, options=options)
        assert compiled.metadata.shared <= SHARED_LIMIT, (self.kernel.__name__, compiled.metadata)
        assert compiled.asm["cubin"]
        print(self.kernel.__name__, compiled.metadata.shared)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def compile_attention(heads, kv_heads, head_dim, page, dtype, kv_dtype=None):
    from engine.kernels import paged_decode as decode
    from engine.kernels import paged_prefill as prefill
    from engine.kernels import store_kv as store

    decode.num_sms = prefill.num_sms = lambda device: 132
    cache = meta(2, 4, 100, page, kv_heads, head_dim, dtype=kv_dtype or dtype)[:, 1]
    q = meta(256, heads, head_dim, dtype=dtype)
    table, ints = meta(256, 64, dtype=torch.int32), meta(256, dtype=torch.int32)
    longs = meta(256, dtype=torch.int64)
    for batch in (256, 2):
        out = meta(batch, heads, head_dim, dtype=dtype)
        decode.paged_decode(q[:batch], cache, table, ints, 4096, 1.0, out, order=longs)
    out = meta(*q.shape, dtype=dtype)
    for splits in (1, prefill.SPLITS):
        prefill.paged_prefill(q, cache, table, ints, ints, 256, 4096, 1.0, out, splits=splits)
    kv = meta(256, kv_heads, head_dim, dtype=dtype)
    store.store_kv(kv, kv, cache, longs)


def compile_layers(dtype):
    from engine.kernels import activation, all_reduce, filters, norm, race
    from engine.kernels import qkv_rope as qkv

    longs, floats = meta(256, dtype=torch.int64), meta(256, dtype=torch.float32)
    rows, weight = meta(256, 1024, dtype=dtype), meta(1024, dtype=dtype)
    norm.fused_rms_norm(rows, weight, 1e-6)
    norm.fused_add_rms_norm(rows, rows, weight, 1e-6)
    activation.fused_silu_mul(meta(256, 6144, dtype=dtype))
    head = meta(128, dtype=dtype)
    cache = meta(2, 100, 16, 8, 128, dtype=dtype)
    table = meta(4096, 128, dtype=torch.float32)
    qkv.qk_norm_rope_store(
        meta(256, 4096, dtype=dtype), head, head, 1e-6, table, longs, cache, longs
    )
    race.fused_race(meta(256, 151_936, dtype=dtype), floats, longs, longs)
    logits = meta(256, 151_936, dtype=dtype)
    kept = filters.fused_filter(logits, floats, longs.int(), floats, floats)
    race.fused_race(logits, floats, longs, longs, kept)
    race.fused_race_rows(logits, race.RaceRows(longs, longs, floats, longs, longs, longs))
    filters.fused_filter(logits.float(), floats, longs.int(), floats, floats)
    race.fused_race_keys(meta(256, 75_968, dtype=dtype), floats, longs, longs, 75_968)
    calls = meta(64, dtype=torch.int32)
    all_reduce.one_shot_all_reduce(rows, longs[:2], calls, 1, 8 * 2**20)


def compile_ragged(heads, kv_heads, head_dim, page, dtype):
    from engine.kernels import ragged
    from engine.kernels.worklist import Worklist, fill_worklist

    ragged.num_sms = lambda device: 132
    sizes = ragged.ragged_sizes(heads, kv_heads, head_dim, dtype, None)
    columns = [meta(256, dtype=torch.int32) for _ in range(4)]
    out = meta(512, heads, head_dim, dtype=dtype)
    work = Worklist.new(meta(257, 64, dtype=torch.int32), out, 256, sizes)
    fill_worklist(work, sizes, *columns, 256)
    cache = meta(2, 4, 100, page, kv_heads, head_dim, dtype=dtype)[:, 1]
    ragged.ragged_attention(out, cache, work, 1.0)


def compile_few_rows(rows, heads, kv_heads, head_dim, hidden, dtype):
    from engine.kernels import rows_attention, rows_dot, rows_linear

    rows_attention.num_sms = lambda device: 132
    rows_linear.can_launch_dependents = rows_attention.can_launch_dependents = lambda device: True
    x, gain = meta(rows, hidden, dtype=dtype), meta(hidden, dtype=dtype)
    weight = meta(6 * hidden, hidden, dtype=dtype)
    rows_linear.rows_linear(x, weight, gain=gain, eps=1e-6)
    rows_linear.rows_linear(x, weight, gain=gain, eps=1e-6, gated=True)
    rows_linear.rows_linear(x, weight[:hidden], meta(hidden, dtype=dtype), residual=x)
    rows_dot.can_launch_dependents = rows_linear.can_launch_dependents
    rows_dot.rows_dot(x, weight, gated=True)
    rows_dot.rows_dot(x, weight[:hidden], residual=x)
    qkv, head = meta(rows, (heads + 2 * kv_heads) * head_dim, dtype=dtype), meta(head_dim)
    longs, ints = meta(rows, dtype=torch.int64), meta(rows * kv_heads, dtype=torch.int32)
    rows_attention.rows_attention(
        qkv, head, head, 1e-6, meta(4096, head_dim, dtype=torch.float32), longs,
        meta(2, 4, 100, 16, kv_heads, head_dim, dtype=dtype)[:, 1], longs,
        meta(rows, 64, dtype=torch.int32), ints, 1.0, ints,
    )  # fmt: skip


def compile_prompt_rows():
    from engine.kernels.prompt_rows import PromptRows, lay_out_prompt_rows

    words = slots = meta(999, dtype=torch.int64)
    tables = meta(257, 64, dtype=torch.int32)
    rows = PromptRows.new(512, 256, torch.device("meta"))
    lay_out_prompt_rows(words, *[slots] * 2, tables, *[slots] * 3, 256, 16, rows, 512, 256)


def compile_fp8():
    """Quantisation, products and KV writes in 8-bit floats, a scale per row and per block."""
    from engine.kernels import fp8_product, fp8_quantise
    from engine.kernels import qkv_rope as qkv

    fp8, floats = torch.float8_e4m3fn, torch.float32
    x = meta(256, 4096)
    for group in (None, 128):
        fp8_quantise.fused_quantise_rows(x, group)
        fp8_quantise.fused_norm_quantise(x, x, meta(4096), 1e-6, group)
        fp8_quantise.fused_silu_mul_quantise(meta(256, 24576), group)
    w = meta(6144, 4096, dtype=fp8)
    for rows in (1, 48, 256):
        a = meta(rows, 4096, dtype=fp8)
        for block, shapes in ((None, ((rows, 1), (6144,))), ((128, 128), ((rows, 32), (48, 32)))):
            scales = (meta(*shape, dtype=floats) for shape in shapes)
            fp8_product.triton_product(a, next(scales), w, next(scales), block, torch.bfloat16)
    cache = meta(2, 100, 16, 8, 128, dtype=fp8)
    table, longs = meta(4096, 128, dtype=floats), meta(256, dtype=torch.int64)
    qkv.qk_norm_rope_store(x, meta(128), meta(128), 1e-6, table, longs, cache, longs, (0.5, 2.0))


def compile_rows():
    from engine.kernels.decode_rows import fused_decode_rows

    longs = meta(257, dtype=torch.int64)
    for width in (1, 256):
        tables = meta(257, width, dtype=torch.int32)
        fused_decode_rows(longs[:256], longs, tables, longs, longs, longs, 256, 16)


def compile_mixtures(dtype):
    """Experts of Qwen3-30B-A3B in every tiling, and sizes that no tile divides."""
    from engine.kernels import dependents
    from engine.kernels.moe_products import grouped_product
    from engine.kernels.moe_route import fused_top_k, order_by_expert, sum_shares

    dependents.can_launch_dependents = lambda device: True
    fp8, floats = torch.float8_e4m3fn, torch.float32
    for tokens, experts, top_k, hidden, width in ((256, 128, 8, 2048, 768), (512, 6, 2, 4096, 96)):
        fused_top_k(meta(tokens, experts, dtype=floats), top_k, True)
        chosen = meta(tokens, top_k, dtype=torch.int32)
        weights = meta(tokens, top_k, dtype=floats)
        x, scale = meta(tokens, hidden, dtype=dtype), meta(tokens, hidden // 32, dtype=floats)
        for block_m in (16, 32, 64, 128) if width == 768 else (32,):
            order = order_by_expert(chosen, 0, experts, block_m)
            gate_up, down = (experts, 2 * width, hidden), (experts, hidden, width)
            rows = grouped_product(x, meta(*gate_up, dtype=dtype), order, top_k, None, dtype)
            shares = grouped_product(rows, meta(*down, dtype=dtype), order, top_k, weights, dtype)
            a, wide = meta(tokens, hidden, dtype=fp8), meta(*gate_up, dtype=fp8)
            for block in (None, (32, 32)):
                grouped_product(a, wide, order, top_k, None, dtype, scale, scale, block)
        sum_shares(shares, chosen, 0, experts)


if __name__ == "__main__":
    JITFunction.__getitem__ = lambda kernel, grid: Compiling(kernel)
    compile_attention(16, 8, 128, 256, torch.bfloat16)
    compile_attention(9, 3, 64, 16, torch.float16)
    compile_ragged(16, 8, 128, 16, torch.bfloat16)
    compile_ragged(8, 4, 256, 256, torch.float16)
    compile_prompt_rows()
    compile_few_rows(1, 16, 8, 128, 1024, torch.bfloat16)
    compile_few_rows(2, 9, 3, 64, 576, torch.bfloat16)
    compile_attention(32, 8, 128, 16, torch.bfloat16, torch.float8_e4m3fn)
    compile_layers(torch.bfloat16)
    compile_fp8()
    compile_rows()
    compile_mixtures(torch.bfloat16)
