# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202 (Triton gives its own meaning to annotations)
"""Paged attention over a worklist: decodes and prompt chunks of one step in one launch.

A program takes one item after another, with all query heads of a KV head packed into one tile. What
the step holds is read on the device, so a captured graph serves every step that fits. Of the parts
of a tile, the one that ends last joins them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.combine import num_sms
from engine.kernels.paged_prefill import _attend
from engine.kernels.sizes import next_power_of_2
from engine.kernels.store_kv import check_cache_layout
from engine.kernels.worklist import ITEM_WORDS, Worklist, WorklistSizes

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class RaggedTuning:
    """Launch parameters, and how a step is cut."""

    block_m: int  # query rows of a tile, the heads of a group included
    block_n: int  # keys per iteration
    num_warps: int
    num_stages: int
    programs_per_sm: int
    items_per_program: int
    min_part: int = 256  # keys


@cache
def default_tuning(head_dim: int, dtype: torch.dtype) -> RaggedTuning:
    """Tiles for chunks; as many programs as fit beside each other."""
    if dtype == torch.float32:
        return RaggedTuning(32, 32, 4, 1, programs_per_sm=2, items_per_program=2)
    block_n = 64 if head_dim <= 128 else 32
    return RaggedTuning(64, block_n, 4, 2, programs_per_sm=2, items_per_program=2)


def ragged_sizes(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    tuning: RaggedTuning | None = None,
) -> WorklistSizes:
    """How a model's attention is cut into items."""
    tuning = tuning or default_tuning(head_dim, dtype)
    group = num_heads // num_kv_heads
    programs = tuning.programs_per_sm * num_sms(device)
    return WorklistSizes(
        num_kv_heads=num_kv_heads,
        rows_per_tile=max(tuning.block_m, next_power_of_2(group)) // group,
        target=max(1, tuning.items_per_program * programs // num_kv_heads),
        key_multiple=tuning.block_n,
        min_part=tuning.min_part,
    )


@triton.jit(do_not_specialize=["table_stride"])
def _ragged_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    items_ptr,
    count_ptr,
    arrived_ptr,
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
    WORDS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    total_work = tl.load(count_ptr) * HKV
    part_size = tl.load(count_ptr + 1)
    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    for work in tl.range(tl.program_id(0), total_work, tl.num_programs(0), num_stages=1):
        head = work % HKV
        item = items_ptr + work // HKV * WORDS
        num_rows = tl.load(item + 2)
        if num_rows > 0:
            slot, first_row, position = tl.load(item), tl.load(item + 1), tl.load(item + 3)
            number, end = tl.load(item + 4), tl.load(item + 5)
            begin = number * part_size
            parts, place = tl.load(item + 6), tl.load(item + 7).to(tl.int64)
            live = r < num_rows * GROUP
            mask = live[:, None] & (d < D)[None, :]
            q_head = (first_row + r // GROUP).to(tl.int64) * (HKV * GROUP) + head * GROUP
            at = (q_head + r % GROUP)[:, None] * D + d[None, :]
            q = tl.load(q_ptr + at, mask=mask, other=0.0)
            if k_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
                # 8-bit floats become float16 in one instruction, and are exact in it.
                q = q.to(tl.float16)
            rows = position + r // GROUP
            diagonal = (position + 1) // BLOCK_N * BLOCK_N  # every row sees all keys before
            seen = position + num_rows
            m = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            table = table_ptr + slot.to(tl.int64) * table_stride
            acc, total, m = _attend(
                acc, total, m, q, k_ptr + head * D, v_ptr + head * D, table, rows,
                begin, tl.minimum(diagonal, end), seen, scale_log2, HKV * D,
                D, PAGE, BLOCK_D, BLOCK_N, STAGES, False, PRECISION,
            )  # fmt: skip
            acc, total, m = _attend(
                acc, total, m, q, k_ptr + head * D, v_ptr + head * D, table, rows,
                tl.maximum(diagonal, begin), end, seen, scale_log2, HKV * D,
                D, PAGE, BLOCK_D, BLOCK_N, STAGES, True, PRECISION,
            )  # fmt: skip
            # A part may hold no key that an early row of the tile sees.
            safe = tl.where(total > 0, total, 1.0)
            if parts == 1:
                out = acc / safe[:, None]
                tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)
            else:
                own = ((place + number) * HKV + head) * BLOCK_M + r
                lse = tl.where(total > 0, m + tl.log2(safe), float("-inf"))
                tl.store(lse_ptr + own, lse, mask=live)
                own_at = own[:, None] * D + d[None, :]
                tl.store(part_ptr + own_at, acc / safe[:, None], mask=mask)
                # All stores of this program come before its arrival.
                tl.debug_barrier()
                counter = arrived_ptr + place * HKV + head
                arrived = tl.atomic_add(counter, 1, sem="acq_rel")
                if arrived == parts - 1:
                    out = _join(
                        part_ptr, lse_ptr, place, head, parts, live, mask, r, d,
                        HKV, D, BLOCK_M, BLOCK_D,
                    )  # fmt: skip
                    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)
                    tl.store(counter, 0)


@triton.jit
def _join(
    part_ptr,
    lse_ptr,
    place,
    head,
    parts,
    live,
    mask,
    r,
    d,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Weighted sum of a tile's parts, by their log-sum-exp."""
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for number in tl.range(0, parts, num_stages=1):
        row = ((place + number) * HKV + head) * BLOCK_M + r
        # Past the first-level cache, which does not see what other multiprocessors write.
        lse = tl.load(lse_ptr + row, mask=live, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            part_ptr + row[:, None] * D + d[None, :], mask=mask, other=0.0, cache_modifier=".cg"
        )
        m_new = tl.maximum(m, lse)
        base = tl.where(m_new > float("-inf"), m_new, 0.0)
        shrink, weight = tl.exp2(m - base), tl.exp2(lse - base)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + part * weight[:, None]
        m = m_new
    return acc / tl.where(total > 0, total, 1.0)[:, None]


def ragged_attention(
    q: Tensor,
    kv_cache: Tensor,
    work: Worklist,
    scale: float,
    tuning: RaggedTuning | None = None,
) -> Tensor:
    """Attention of q [T, Hq, D] for the items of `work`, in its buffer; the next call reuses it.

    Rows that belong to no item hold what they held before, which is finite.
    """
    num_rows, num_heads, head_dim = q.shape
    _, _, page, num_kv_heads, _ = kv_cache.shape
    check_cache_layout(kv_cache)
    assert q.is_contiguous()
    out = work.out[:num_rows]
    assert out.shape == q.shape
    group = num_heads // num_kv_heads
    tuning = tuning or default_tuning(head_dim, q.dtype)
    block_m = max(tuning.block_m, next_power_of_2(group))
    assert work.rows_per_tile == block_m // group
    room = (work.most_partial, num_kv_heads, block_m)
    part = torch.empty((*room, head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty(room, dtype=torch.float32, device=q.device)
    most = work.items.shape[0] * num_kv_heads
    programs = min(most, tuning.programs_per_sm * num_sms(q.device))
    _ragged_kernel[(programs,)](
        q,
        kv_cache[0],
        kv_cache[1],
        work.block_tables,
        work.items,
        work.count,
        work.arrived,
        out,
        part,
        lse,
        scale * _LOG2_E,
        work.block_tables.stride(0),
        HKV=num_kv_heads,
        GROUP=group,
        D=head_dim,
        PAGE=page,
        BLOCK_M=block_m,
        BLOCK_D=next_power_of_2(head_dim),
        BLOCK_N=tuning.block_n,
        STAGES=tuning.num_stages,
        WORDS=ITEM_WORDS,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tuning.num_warps,
    )
    return out
