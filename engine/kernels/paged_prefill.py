# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202 (Triton gives its own meaning to annotations)
"""Paged prefill: the queries of a chunk attend to all earlier keys of their sequence, causally."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.combine import combine_parts, new_parts, num_sms
from engine.kernels.sizes import cdiv, next_power_of_2
from engine.kernels.store_kv import check_cache_layout

_LOG2_E = 1.4426950408889634
# A short chunk behind a long prefix fills few multiprocessors, each with a long walk over the keys.
# One number of parts is enough, and compiles once.
SPLITS = 8
MIN_KEYS_TO_SPLIT = 2048


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """Launch parameters of the prefill kernel."""

    block_m: int  # queries per program
    block_n: int  # keys per iteration
    num_warps: int
    num_stages: int


@cache
def default_tuning(head_dim: int, dtype: torch.dtype) -> PrefillTuning:
    """Tile sizes by head dim and dtype.

    On an H200 small tiles win: two or three programs share a multiprocessor, and one's softmax
    runs beside another's matrix products.
    """
    if dtype == torch.float32:
        return PrefillTuning(block_m=32, block_n=32, num_warps=4, num_stages=1)
    if head_dim <= 128:
        return PrefillTuning(block_m=64, block_n=64, num_warps=4, num_stages=2)
    return PrefillTuning(block_m=64, block_n=32, num_warps=4, num_stages=2)


@triton.jit
def _attend(
    acc,
    total,
    m,
    q,
    k_base,
    v_base,
    table,
    rows,
    begin,
    end,
    context,
    scale_log2,
    TOKEN_STRIDE: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the keys of [begin, end) to the running softmax; MASKED tiles touch the diagonal.

    `rows` holds the queries' positions.
    """
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        start = tl.multiple_of(start, BLOCK_N)
        key = start + n
        if PAGE % BLOCK_N == 0:
            page = tl.load(table + start // PAGE).to(tl.int64)
            offset = page * (PAGE * TOKEN_STRIDE) + (start % PAGE + n) * TOKEN_STRIDE
        elif MASKED:
            pages = tl.load(table + key // PAGE, mask=key < context, other=0).to(tl.int64)
            offset = pages * (PAGE * TOKEN_STRIDE) + (key % PAGE) * TOKEN_STRIDE
        else:
            pages = tl.load(table + key // PAGE).to(tl.int64)
            offset = pages * (PAGE * TOKEN_STRIDE) + (key % PAGE) * TOKEN_STRIDE
        k_at = k_base + offset[None, :] + d[:, None]
        v_at = v_base + offset[:, None] + d[None, :]
        if MASKED:
            # Slots beyond the context may hold anything, even what is not a number.
            live = key < context
            k = tl.load(k_at, mask=live[None, :] & (d < D)[:, None], other=0.0)
            v = tl.load(v_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
        elif BLOCK_D == D:
            k = tl.load(k_at)
            v = tl.load(v_at)
        else:
            k = tl.load(k_at, mask=(d < D)[:, None], other=0.0)
            v = tl.load(v_at, mask=(d < D)[None, :], other=0.0)
        if k.dtype == tl.float8e4nv:
            k, v = k.to(q.dtype), v.to(q.dtype)
        score = tl.dot(q, k, input_precision=PRECISION) * scale_log2
        if MASKED:
            score = tl.where(key[None, :] <= rows[:, None], score, float("-inf"))
        m_new = tl.maximum(m, tl.max(score, axis=1))
        if MASKED:
            # A row may have met no key yet, if this part of the context begins on the diagonal.
            base = tl.where(m_new > float("-inf"), m_new, 0.0)
        else:
            base = m_new
        p = tl.exp2(score - base[:, None])
        shrink = tl.exp2(m - base)
        total = total * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        m = m_new
    return acc, total, m


@triton.jit
def _part_of(end, split, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Bounds of one of SPLITS equal parts of [0, end), on multiples of the tile."""
    size = tl.cdiv(tl.cdiv(end, BLOCK_N), SPLITS) * BLOCK_N
    return split * size, tl.minimum(end, (split + 1) * size)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "context_ptr", "bounds_ptr"],
)
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    context_ptr,
    bounds_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    scale_log2,
    table_stride,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0)
    chunk = tl.program_id(2) // SPLITS
    split = tl.program_id(2) % SPLITS
    num_heads: tl.constexpr = HKV * GROUP
    first_token = tl.load(bounds_ptr + chunk)
    num_queries = tl.load(bounds_ptr + chunk + 1) - first_token
    # Late tiles see the most keys: they start first, so that the last ones to run are short.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    if tile * BLOCK_M >= num_queries:
        return
    context = tl.load(context_ptr + chunk)
    prefix = context - num_queries
    m_offsets = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    mask = (m_offsets < num_queries)[:, None] & (d < D)[None, :]
    at = ((first_token + m_offsets).to(tl.int64) * num_heads + head)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at, mask=mask, other=0.0)
    if k_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        # 8-bit floats become float16 in one instruction, and are exact in it.
        q = q.to(tl.float16)

    first_row = prefix + tile * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    diagonal = (first_row + 1) // BLOCK_N * BLOCK_N  # every row of the tile sees all keys before
    end = tl.minimum(context, first_row + BLOCK_M)
    begin = 0
    if SPLITS > 1:
        begin, end = _part_of(end, split, SPLITS, BLOCK_N)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    kv_offset = (head // GROUP) * D
    table = table_ptr + chunk.to(tl.int64) * table_stride
    acc, total, m = _attend(
        acc, total, m, q, k_ptr + kv_offset, v_ptr + kv_offset, table, rows,
        begin, tl.minimum(diagonal, end), context, scale_log2, HKV * D,
        D, PAGE, BLOCK_D, BLOCK_N, STAGES, False, PRECISION,
    )  # fmt: skip
    acc, total, m = _attend(
        acc, total, m, q, k_ptr + kv_offset, v_ptr + kv_offset, table, rows,
        tl.maximum(diagonal, begin), end, context, scale_log2, HKV * D,
        D, PAGE, BLOCK_D, BLOCK_N, STAGES, True, PRECISION,
    )  # fmt: skip
    if SPLITS == 1:
        out = acc / total[:, None]
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        safe = tl.where(total > 0, total, 1.0)
        lse = tl.where(total > 0, m + tl.log2(safe), float("-inf"))
        row = ((first_token + m_offsets).to(tl.int64) * num_heads + head) * SPLITS + split
        tl.store(lse_ptr + row, lse, mask=m_offsets < num_queries)
        tl.store(part_ptr + row[:, None] * D + d[None, :], acc / safe[:, None], mask=mask)


def paged_prefill(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    out: Tensor,
    tuning: PrefillTuning | None = None,
    splits: int | None = None,
) -> None:
    """Attention of the chunks' queries [T, Hq, D] into `out`; chunk i is rows cu[i]..cu[i+1].

    `splits`, 1 or SPLITS, is chosen from the other sizes if it is not given.
    """
    _, num_heads, head_dim = q.shape
    _, _, page, num_kv_heads, _ = kv_cache.shape
    check_cache_layout(kv_cache)
    assert q.is_contiguous()
    assert out.is_contiguous()
    if tuning is None:
        tuning = default_tuning(head_dim, q.dtype)
    num_chunks, tiles = context_lens.shape[0], cdiv(max_seqlen_q, tuning.block_m)
    if splits is None:
        programs = num_heads * tiles * num_chunks
        is_worth_it = programs <= num_sms(q.device) and max_seqlen_k >= MIN_KEYS_TO_SPLIT
        splits = SPLITS if is_worth_it else 1
    part, lse = (out, out) if splits == 1 else new_parts(q, splits)
    _prefill_kernel[(num_heads, tiles, num_chunks * splits)](
        q,
        kv_cache[0],
        kv_cache[1],
        block_tables,
        context_lens,
        cu_seqlens_q,
        out,
        part,
        lse,
        scale * _LOG2_E,
        block_tables.stride(0),
        HKV=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        D=head_dim,
        PAGE=page,
        BLOCK_M=tuning.block_m,
        BLOCK_D=next_power_of_2(head_dim),
        BLOCK_N=tuning.block_n,
        STAGES=tuning.num_stages,
        SPLITS=splits,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tuning.num_warps,
    )
    if splits > 1:
        combine_parts(part, lse, out)
