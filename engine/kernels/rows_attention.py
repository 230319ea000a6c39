# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202 (Triton gives its own meaning to annotations)
"""Attention of few decode rows in one kernel: head norms, rotation, KV write, walk and joining.

A row's keys are cut into as many parts as its length gives work for. Each program rotates the
queries itself; the last part also takes the row's new key and value, which it writes to the cache.
The part that ends last joins them all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.combine import new_parts, num_sms
from engine.kernels.rows_linear import can_launch_dependents
from engine.kernels.sizes import next_power_of_2
from engine.kernels.store_kv import check_cache_layout

_LOG2_E = 1.4426950408889634
_PROGRAMS_PER_SM = 2
_MOST_SPLITS = 16
# Keys that a program has in its registers before it waits for the kernel ahead.
_FIRST_KEYS = 256


def most_splits(num_rows: int, num_kv_heads: int, device: torch.device) -> int:
    """Parts that a long context is cut into, a power of two."""
    wanted = max(1, _PROGRAMS_PER_SM * num_sms(device) // (num_rows * num_kv_heads))
    return min(_MOST_SPLITS, 1 << (wanted.bit_length() - 1))


@triton.jit
def _rotated(x_ptr, gain_ptr, cos_sin_ptr, d, live, mask, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Heads at `x_ptr` [.., 1] normalised and rotated, in float32."""
    half: tl.constexpr = D // 2
    other = tl.where(d < half, d + half, d - half)
    x = tl.load(x_ptr + d, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + other, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / D + eps)
        x = x * inverse * tl.load(gain_ptr + d, mask=live, other=0.0).to(tl.float32)
        y = y * inverse * tl.load(gain_ptr + other, mask=live, other=0.0).to(tl.float32)
    angle = tl.where(d < half, d, d - half)
    cos = tl.load(cos_sin_ptr + angle, mask=live, other=0.0)
    sin = tl.load(cos_sin_ptr + half + angle, mask=live, other=0.0)
    return x * cos + tl.where(d < half, -sin, sin) * y


@triton.jit
def _places(table, start, end, n, kv_head, HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Where the keys of a tile lie in the cache, and which of them count."""
    key = start + n
    live = key < end
    pages = tl.load(table + key // PAGE, mask=live, other=0, cache_modifier=".cg").to(tl.int64)
    return (pages * PAGE + key % PAGE) * (HKV * D) + kv_head * D, live


@triton.jit
def _add_keys(q, k, v, live, m, total, acc, scale_log2, PRECISION: tl.constexpr):
    """Add a tile of keys and values [N, D] to the running softmax."""
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    score = tl.where(live[None, :], score, float("-inf"))
    m_new = tl.maximum(m, tl.max(score, axis=1))
    base = tl.where(m_new > float("-inf"), m_new, 0.0)
    p = tl.exp2(score - base[:, None])
    shrink = tl.exp2(m - base)
    total = total * shrink + tl.sum(p, axis=1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return m_new, total, acc


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "context_ptr", "positions_ptr", "slots_ptr"],
)
def _rows_attention_kernel(
    qkv_ptr,
    q_gain_ptr,
    k_gain_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    context_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    arrived_ptr,
    eps,
    scale_log2,
    table_stride,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FIRST_N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head, split = tl.program_id(0), tl.program_id(2)
    row = tl.program_id(1).to(tl.int64)
    # Of the kernel ahead only the projections are needed: the lengths, the table and the older
    # keys were written by kernels that it has waited for itself.
    context = tl.load(context_ptr + row, cache_modifier=".cg")
    old = tl.maximum(context - 1, 0)  # keys of earlier steps
    tiles = tl.cdiv(old, FIRST_N)
    part_tiles = tl.maximum(tl.cdiv(tiles, tl.num_programs(2)), 1)
    parts = tl.maximum(tl.cdiv(tiles, part_tiles), 1)
    begin = split * part_tiles * FIRST_N
    end = tl.minimum(old, begin + part_tiles * FIRST_N)
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)[None, :]
    live_d = d < D
    table = table_ptr + row * table_stride
    place, live = _places(table, begin, end, tl.arange(0, FIRST_N), kv_head, HKV, D, PAGE)
    kv_mask = live[:, None] & live_d
    k = tl.load(k_ptr + place[:, None] + d, mask=kv_mask, other=0.0)
    v = tl.load(v_ptr + place[:, None] + d, mask=kv_mask, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if split < parts:
        dtype = qkv_ptr.dtype.element_ty
        source = qkv_ptr + row * (HKV * (GROUP + 2)) * D
        angles = cos_sin_ptr + tl.load(positions_ptr + row) * D
        q_mask = (h < GROUP)[:, None] & live_d
        heads = source + ((kv_head * GROUP + h) * D)[:, None]
        q = _rotated(heads, q_gain_ptr, angles, d, live_d, q_mask, eps, D, NORM).to(dtype)
        m = tl.full([BLOCK_H], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        m, total, acc = _add_keys(q, k, v, live, m, total, acc, scale_log2, PRECISION)
        for start in tl.range(begin + FIRST_N, end, BLOCK_N, num_stages=STAGES):
            n = tl.arange(0, BLOCK_N)
            at, there = _places(table, start, end, n, kv_head, HKV, D, PAGE)
            there_d = there[:, None] & live_d
            ks = tl.load(k_ptr + at[:, None] + d, mask=there_d, other=0.0)
            vs = tl.load(v_ptr + at[:, None] + d, mask=there_d, other=0.0)
            m, total, acc = _add_keys(q, ks, vs, there, m, total, acc, scale_log2, PRECISION)
        if split == parts - 1:
            new_key = source + (HKV * GROUP + kv_head) * D
            key = _rotated(new_key, k_gain_ptr, angles, d, live_d, live_d, eps, D, NORM).to(dtype)
            value = tl.load(new_key + HKV * D + d, mask=live_d, other=0.0)
            slot = tl.load(slots_ptr + row)
            target = slot * (HKV * D) + kv_head * D + d
            if slot >= 0:
                tl.store(k_ptr + target, key, mask=live_d)
                tl.store(v_ptr + target, value, mask=live_d)
            score = tl.sum(q.to(tl.float32) * key.to(tl.float32), axis=1) * scale_log2
            m_new = tl.maximum(m, score)
            p = tl.exp2(score - m_new)
            shrink = tl.exp2(m - m_new)
            total = total * shrink + p
            acc = acc * shrink[:, None] + p[:, None] * value.to(tl.float32)
            m = m_new
        result = acc / total[:, None]
        first_head = (row * HKV + kv_head) * GROUP
        if parts == 1:
            at = (first_head + h)[:, None] * D + d
            tl.store(out_ptr + at, result.to(dtype), mask=q_mask)
        else:
            own = (first_head + h) * SPLITS + split
            tl.store(lse_ptr + own, m + tl.log2(total), mask=h < GROUP)
            tl.store(part_ptr + own[:, None] * D + d, result, mask=q_mask)
            # All stores of this program come before its arrival.
            tl.debug_barrier()
            counter = arrived_ptr + row * HKV + kv_head
            arrived = tl.atomic_add(counter, 1, sem="acq_rel")
            if arrived == parts - 1:
                _join_heads(
                    part_ptr, lse_ptr, out_ptr, first_head, parts,
                    GROUP, GROUP_BLOCK, D, SPLITS, BLOCK_D,
                )  # fmt: skip
                tl.store(counter, 0)


@triton.jit
def _join_heads(
    part_ptr,
    lse_ptr,
    out_ptr,
    first_head,
    parts,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Weighted sums of the parts of a KV head's query heads, by their log-sum-exp.

    All heads at once, so that all that is read is under way together.
    """
    s = tl.arange(0, SPLITS)[None, :]
    g = tl.arange(0, GROUP_BLOCK)[:, None]
    d = tl.arange(0, BLOCK_D)
    live = (s < parts) & (g < GROUP)
    at = (first_head + g) * SPLITS + s
    # Past the first-level cache, which does not see what other multiprocessors write.
    part = tl.load(
        part_ptr + at[:, :, None] * D + d[None, None, :],
        mask=live[:, :, None] & (d < D)[None, None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    lse = tl.load(lse_ptr + at, mask=live, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(lse, axis=1, keep_dims=True)
    weight = tl.exp2(lse - tl.where(top > float("-inf"), top, 0.0))
    total = tl.sum(weight, axis=1, keep_dims=True)
    weight = weight / tl.where(total > 0, total, 1.0)
    out = tl.sum(part * weight[:, :, None], axis=1)
    out_at = (first_head + g) * D + d[None, :]
    mask = (g < GROUP) & (d < D)[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=mask)


def rows_attention(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    arrived: Tensor,
    splits: int | None = None,
) -> Tensor:
    """Attention output [R, Hq, D] for the fused projections [R, (Hq + 2 Hkv) D] of decode rows.

    Their keys and values go to `slot_mapping` (-1: a padded row, whose output means nothing).
    `arrived` is int32 [R * Hkv], zero before and after.
    """
    num_kv_heads, head_dim = kv_cache.shape[3:]
    num_rows, width = qkv.shape
    num_heads = width // head_dim - 2 * num_kv_heads
    group = num_heads // num_kv_heads
    check_cache_layout(kv_cache)
    assert qkv.is_contiguous()
    out = torch.empty((num_rows, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if splits is None:
        splits = most_splits(num_rows, num_kv_heads, qkv.device)
    part, lse = (out, out) if splits == 1 else new_parts(out, _MOST_SPLITS)
    norm = q_norm is not None and k_norm is not None
    is_float32 = qkv.dtype == torch.float32
    pdl = can_launch_dependents(qkv.device)
    first = 64 if is_float32 else _FIRST_KEYS if head_dim <= 128 else _FIRST_KEYS // 2
    _rows_attention_kernel[(num_kv_heads, num_rows, splits)](
        qkv,
        q_norm if norm else qkv,
        k_norm if norm else qkv,
        cos_sin,
        positions,
        slot_mapping,
        kv_cache[0],
        kv_cache[1],
        block_tables,
        context_lens,
        out,
        part,
        lse,
        arrived,
        eps,
        scale * _LOG2_E,
        block_tables.stride(0),
        HKV=num_kv_heads,
        GROUP=group,
        GROUP_BLOCK=next_power_of_2(group),
        D=head_dim,
        PAGE=kv_cache.shape[2],
        SPLITS=_MOST_SPLITS,
        BLOCK_H=max(16, next_power_of_2(group)),
        BLOCK_D=next_power_of_2(head_dim),
        FIRST_N=first,
        BLOCK_N=32 if is_float32 or head_dim > 128 else 64,
        STAGES=1 if is_float32 else 2,
        NORM=norm,
        PRECISION="ieee" if is_float32 else "tf32",
        PDL=pdl,
        num_warps=8,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
