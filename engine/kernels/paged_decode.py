# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202 (Triton gives its own meaning to annotations)
"""Paged decode: one query token per sequence, keys and values read once per KV head.

A program takes one KV head of one sequence, with all its query heads packed into one tile, and one
of `num_splits` parts of the context. The grid depends on host values only, while each program cuts
its part from the context length that it reads on the device: a captured graph stays balanced
whatever the lengths are at replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.combine import MOST_SPLITS, combine_parts, new_parts, num_sms
from engine.kernels.sizes import cdiv, next_power_of_2
from engine.kernels.store_kv import check_cache_layout

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """Launch parameters of the decode kernel."""

    block_n: int  # keys per iteration
    num_warps: int
    num_stages: int
    target_programs: int  # the context is split until about this many programs run
    min_split: int  # keys; shorter parts cost more to combine than they save


@cache
def default_tuning(head_dim: int, dtype: torch.dtype, num_sms: int) -> DecodeTuning:
    """Tile sizes that keep about 100 KB of keys and values in flight per multiprocessor.

    `dtype` is the cache's.
    """
    wide = head_dim > 128 or dtype == torch.float32
    if dtype.itemsize == 1:
        # Fewer warps share a tile, so that more tiles are read at a time (measured on an H200).
        return DecodeTuning(32 if wide else 64, 2, 3, target_programs=6 * num_sms, min_split=128)
    return DecodeTuning(
        block_n=32 if wide else 64,
        num_warps=4,
        num_stages=2 if dtype == torch.float32 else 3,
        target_programs=6 * num_sms,
        min_split=128,
    )


@cache
def num_splits(batch: int, num_kv_heads: int, max_context: int, tuning: DecodeTuning) -> int:
    """Parts per sequence, a power of two, from host values only."""
    wanted = cdiv(tuning.target_programs, batch * num_kv_heads)
    most = max(1, max_context // tuning.min_split)
    splits = min(wanted, most, MOST_SPLITS)
    # Rounding down keeps a batch that fills the device almost alone from paying for a second pass.
    return 1 << (splits.bit_length() - 1)


@triton.jit
def _fp8_pairs(pairs, dtype: tl.constexpr, ON_GPU: tl.constexpr):
    """Even and odd columns of 8-bit floats that lie two in 16 bits."""
    if ON_GPU:
        halves = tl.inline_asm_elementwise(
            "{ .reg .b32 both; cvt.rn.f16x2.e4m3x2 both, $2; mov.b32 {$0, $1}, both; }",
            "=h,=h,h",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
        return halves[0].to(dtype), halves[1].to(dtype)
    even = ((pairs & 0x80) << 8) | ((pairs & 0x7F) << 7)
    odd = (pairs & 0x8000) | ((pairs & 0x7F00) >> 1)
    # The same bits as float16 are 2^8 times too small: the exponents differ in their bias.
    even = even.to(tl.uint16).to(tl.float16, bitcast=True) * 256.0
    odd = odd.to(tl.uint16).to(tl.float16, bitcast=True) * 256.0
    return even.to(dtype), odd.to(dtype)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "context_ptr", "order_ptr"],
)
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    context_ptr,
    order_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    scale_log2,
    table_stride,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    ORDERED: tl.constexpr,
    PRECISION: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if ORDERED:
        row = tl.load(order_ptr + row)
    split = tl.program_id(2)
    num_q_heads: tl.constexpr = HKV * GROUP
    token_stride: tl.constexpr = HKV * D
    block_stride: tl.constexpr = PAGE * token_stride
    context = tl.load(context_ptr + row)
    # Read from the grid: a kernel for every number of parts would be compiled while serving.
    splits = 1
    if SPLIT:
        splits = tl.num_programs(2)
    tiles = tl.cdiv(tl.cdiv(context, BLOCK_N), splits)
    begin = split * tiles * BLOCK_N
    end = tl.minimum(context, begin + tiles * BLOCK_N)

    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    heads = kv_head * GROUP + h
    q_mask = (h < GROUP)[:, None] & (d < D)[None, :]
    q_at = (row * num_q_heads + heads)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + q_at, mask=q_mask, other=0.0)
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    kv_fp8: tl.constexpr = k_ptr.dtype.element_ty == tl.float8e4nv
    # Bytes cannot be turned round on their way to the matrix units, pairs of them can: 8-bit values
    # are read two at a time, and even and odd columns summed apart.
    columns: tl.constexpr = BLOCK_D // 2 if kv_fp8 else BLOCK_D
    acc = tl.zeros([BLOCK_H, columns], tl.float32)
    acc_odd = acc
    pair = tl.arange(0, BLOCK_D // 2)
    table = table_ptr + row * table_stride
    k_base = k_ptr + kv_head * D
    v_base = v_ptr + kv_head * D
    if kv_fp8:
        v_pairs = v_base.to(tl.pointer_type(tl.uint16))
    if kv_fp8 and q.dtype == tl.bfloat16:
        # 8-bit floats become float16 in one instruction, and are exact in it.
        q = q.to(tl.float16)

    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        key = start + n
        live = key < end
        if PAGE % BLOCK_N == 0:
            # A whole tile lies in one page, since parts begin on multiples of the tile.
            page = tl.load(table + start // PAGE).to(tl.int64)
            offset = page * block_stride + (start % PAGE + n) * token_stride
        else:
            pages = tl.load(table + key // PAGE, mask=live, other=0).to(tl.int64)
            offset = pages * block_stride + (key % PAGE) * token_stride
        k_mask = live[None, :] & (d < D)[:, None]
        k = tl.load(k_base + offset[None, :] + d[:, None], mask=k_mask, other=0.0)  # [D, N]
        if kv_fp8:
            k = k.to(q.dtype)
            pair_mask = live[:, None] & (pair < D // 2)[None, :]
            pairs = tl.load(
                v_pairs + (offset // 2)[:, None] + pair[None, :], mask=pair_mask, other=0
            )
            v, v_odd = _fp8_pairs(pairs, q.dtype, ON_GPU)  # [N, D / 2]
        else:
            v_mask = live[:, None] & (d < D)[None, :]
            v = tl.load(v_base + offset[:, None] + d[None, :], mask=v_mask, other=0.0)  # [N, D]
        score = tl.dot(q, k, input_precision=PRECISION) * scale_log2
        score = tl.where(live[None, :], score, float("-inf"))
        m_new = tl.maximum(m, tl.max(score, axis=1))
        p = tl.exp2(score - m_new[:, None])
        shrink = tl.exp2(m - m_new)
        total = total * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        if kv_fp8:
            acc_odd = acc_odd * shrink[:, None]
            acc_odd = tl.dot(p.to(v.dtype), v_odd, acc_odd, input_precision=PRECISION)
        m = m_new

    # A padded row has no key at all; its output is zero, not a division by zero.
    safe = tl.where(total > 0, total, 1.0)
    result = acc / safe[:, None]
    if kv_fp8:
        result = tl.reshape(tl.join(result, acc_odd / safe[:, None]), [BLOCK_H, BLOCK_D])
    if not SPLIT:
        tl.store(out_ptr + q_at, result.to(out_ptr.dtype.element_ty), mask=q_mask)
    else:
        index = (row * num_q_heads + heads) * splits + split
        lse = tl.where(total > 0, m + tl.log2(safe), float("-inf"))
        tl.store(lse_ptr + index, lse, mask=h < GROUP)
        tl.store(part_ptr + index[:, None] * D + d[None, :], result, mask=q_mask)


def paged_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context: int,
    scale: float,
    out: Tensor,
    tuning: DecodeTuning | None = None,
    order: Tensor | None = None,
) -> None:
    """Attention of q [B, Hq, D], one token per sequence, into `out` [B, Hq, D].

    `max_context` is a host-side bound and decides the grid; a row of context 0 gets zeros. `order`
    is the order in which rows are started, as a permutation int64 [B].
    """
    batch, num_heads, head_dim = q.shape
    _, _, page, num_kv_heads, _ = kv_cache.shape
    group = num_heads // num_kv_heads
    check_cache_layout(kv_cache)
    assert q.is_contiguous()
    assert out.is_contiguous()
    if tuning is None:
        tuning = default_tuning(head_dim, kv_cache.dtype, num_sms(q.device))
    splits = num_splits(batch, num_kv_heads, max_context, tuning)
    part, lse = (out, out) if splits == 1 else new_parts(q, splits)
    _decode_kernel[(num_kv_heads, batch, splits)](
        q,
        kv_cache[0],
        kv_cache[1],
        block_tables,
        context_lens,
        context_lens if order is None else order,
        out,
        part,
        lse,
        scale * _LOG2_E,
        block_tables.stride(0),
        HKV=num_kv_heads,
        GROUP=group,
        D=head_dim,
        PAGE=page,
        SPLIT=splits > 1,
        BLOCK_H=max(16, next_power_of_2(group)),
        BLOCK_D=next_power_of_2(head_dim),
        BLOCK_N=tuning.block_n,
        STAGES=tuning.num_stages,
        ORDERED=order is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        ON_GPU=q.device.type != "cpu",
        num_warps=tuning.num_warps,
    )
    if splits > 1:
        combine_parts(part, lse, out)
