# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202 (Triton gives its own meaning to annotations)
"""Grouped matrix products: each tile of pairs meets the matrices of its expert.

Two launches serve a layer, whatever the router chose. The first gathers the tokens, multiplies by
gate and up and applies silu(gate) * up; the second multiplies by down and by the router's weight
and puts each pair's share in its place. Operands may be 8-bit floats with scales: one per row and
output column, or one per block of rows and columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.dependents import early_launch
from engine.kernels.moe_route import ExpertOrder
from engine.kernels.sizes import cdiv, next_power_of_2


@dataclass(frozen=True, slots=True)
class GroupedTuning:
    """Launch parameters of one product; `block_m` is the order's."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@cache
def block_m_for(num_pairs: int, num_experts: int) -> int:
    """Rows per tile: about as many as an expert gets."""
    per_expert = num_pairs / min(num_experts, max(1, num_pairs))
    if per_expert <= 8:
        return 16
    if per_expert <= 24:
        return 32
    return 64 if per_expert <= 96 else 128


@cache
def default_tuning(block_m: int, dtype: torch.dtype, gated: bool) -> GroupedTuning:
    """Tile sizes by rows per tile: few rows are about reading weights, many about arithmetic."""
    if dtype == torch.float32:
        return GroupedTuning(block_n=32, block_k=32, num_warps=4, num_stages=2)
    if dtype.itemsize == 1:
        return _FP8_TUNING[block_m, gated]
    return _TUNING[block_m, gated]


# Measured on an H200 with the shapes of Qwen3-30B-A3B, by rows per tile and whether gated.
_TUNING = {
    (16, True): GroupedTuning(64, 128, num_warps=4, num_stages=4),
    (16, False): GroupedTuning(64, 128, num_warps=4, num_stages=4),
    (32, True): GroupedTuning(64, 64, num_warps=4, num_stages=5),
    (32, False): GroupedTuning(64, 128, num_warps=4, num_stages=4),
    (64, True): GroupedTuning(64, 64, num_warps=4, num_stages=4),
    (64, False): GroupedTuning(128, 64, num_warps=4, num_stages=4),
    (128, True): GroupedTuning(128, 64, num_warps=8, num_stages=3),
    (128, False): GroupedTuning(128, 64, num_warps=8, num_stages=3),
}
_FP8_TUNING = {
    (16, True): GroupedTuning(64, 256, num_warps=4, num_stages=3),
    (16, False): GroupedTuning(64, 256, num_warps=4, num_stages=3),
    (32, True): GroupedTuning(128, 128, num_warps=4, num_stages=4),
    (32, False): GroupedTuning(128, 128, num_warps=4, num_stages=4),
    (64, True): GroupedTuning(64, 128, num_warps=4, num_stages=4),
    (64, False): GroupedTuning(128, 128, num_warps=4, num_stages=4),
    (128, True): GroupedTuning(128, 128, num_warps=8, num_stages=4),
    (128, False): GroupedTuning(128, 128, num_warps=8, num_stages=3),
}


@triton.jit
def _load_tile(base, rows, columns, row_mask, k, K: tl.constexpr, EVEN: tl.constexpr):
    """Rows of a row-major matrix of K columns, from column k on."""
    at = base + rows + (k + columns)
    if EVEN:
        return tl.load(at, mask=row_mask, other=0.0)
    return tl.load(at, mask=row_mask & (k + columns < K), other=0.0)


@triton.jit
def _grouped_kernel(
    a_ptr,
    w_ptr,
    out_ptr,
    a_scale_ptr,
    w_scale_ptr,
    pairs_ptr,
    tile_expert_ptr,
    tile_first_ptr,
    end_ptr,
    weights_ptr,
    K: tl.constexpr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """GATED: a holds tokens and w gate and up, each N rows; else a holds the pairs in order.

    SCALED is 0 (no scales), 1 (per row and column) or 2 (per block of GROUP_N by GROUP_K).
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tile = tl.program_id(1)
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(tile_first_ptr + tile) + tl.arange(0, BLOCK_M)
    live = place < tl.load(end_ptr + expert)
    pair = tl.load(pairs_ptr + place, mask=live, other=0)
    row = place.to(tl.int64)
    if GATED:
        row = (pair // TOP_K).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_offsets = tl.arange(0, BLOCK_K)
    even: tl.constexpr = K % BLOCK_K == 0
    rows_of_w: tl.constexpr = 2 * N if GATED else N
    w_base = w_ptr + expert * rows_of_w * K
    a_rows = (row * K)[:, None]
    w_rows = (n * K)[None, :]
    n_mask = (n < N)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    groups: tl.constexpr = (K + GROUP_K - 1) // GROUP_K if SCALED == 2 else 1
    if SCALED == 2:
        tl.static_assert(GROUP_K % BLOCK_K == 0 or GROUP_K == BLOCK_K)
        group_rows: tl.constexpr = (N + GROUP_N - 1) // GROUP_N
        scale_base = w_scale_ptr + expert * (group_rows * (2 if GATED else 1)) * groups
        w_scale_at = scale_base + (n // GROUP_N) * groups
        up_scale_at = w_scale_at + group_rows * groups
        a_scale_at = a_scale_ptr + row * groups
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        a = _load_tile(a_ptr, a_rows, k_offsets[None, :], live[:, None], k, K, even)
        w = _load_tile(w_base, w_rows, k_offsets[:, None], n_mask, k, K, even)
        if SCALED == 2:
            group = k // GROUP_K
            a_scale = tl.load(a_scale_at + group, mask=live, other=0.0)[:, None]
            w_scale = tl.load(w_scale_at + group, mask=n < N, other=0.0)[None, :]
            acc += tl.dot(a, w) * (a_scale * w_scale)
        else:
            acc = tl.dot(a, w, acc, input_precision=PRECISION)
        if GATED:
            up = _load_tile(w_base + N * K, w_rows, k_offsets[:, None], n_mask, k, K, even)
            if SCALED == 2:
                up_scale = tl.load(up_scale_at + group, mask=n < N, other=0.0)[None, :]
                up_acc += tl.dot(a, up) * (a_scale * up_scale)
            else:
                up_acc = tl.dot(a, up, up_acc, input_precision=PRECISION)
    if SCALED == 1:
        a_scale = tl.load(a_scale_ptr + row, mask=live, other=0.0)[:, None]
        scale_at = w_scale_ptr + expert * rows_of_w + n
        acc = acc * a_scale * tl.load(scale_at, mask=n < N, other=0.0)[None, :]
        if GATED:
            up_acc = up_acc * a_scale * tl.load(scale_at + N, mask=n < N, other=0.0)[None, :]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up_acc
        target = place.to(tl.int64)
    else:
        acc = acc * tl.load(weights_ptr + pair, mask=live, other=0.0)[:, None]
        target = pair.to(tl.int64)
    at = out_ptr + (target * N)[:, None] + n[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & n_mask)


def grouped_product(
    a: Tensor,
    w: Tensor,
    order: ExpertOrder,
    top_k: int,
    weights: Tensor | None,
    out_dtype: torch.dtype,
    a_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
    block: tuple[int, int] | None = None,
    tuning: GroupedTuning | None = None,
) -> Tensor:
    """One grouped product, [pairs, N].

    Without `weights` it is the gated one: `a` [T, K] are tokens, `w` [E, 2 N, K] gate above up, and
    the rows of the result lie in the order of the experts. With `weights` [T, top_k] it is the
    second: `a` [pairs, K] lies in that order, `w` is [E, N, K], and pair p of the result is row p.
    Scales of 8-bit operands: `a_scale` [rows] and `w_scale` [E, rows of w], or, with `block`,
    [rows, K / block[1]] and [E, rows of w / block[0], K / block[1]].
    """
    gated = weights is None
    _, rows_of_w, size = w.shape
    n = rows_of_w // 2 if gated else rows_of_w
    assert a.is_contiguous() and w.is_contiguous()
    assert a.shape[1] == size
    num_pairs = order.pairs.numel()
    out = torch.empty((num_pairs, n), dtype=out_dtype, device=a.device)
    if num_pairs == 0:
        return out
    if tuning is None:
        tuning = default_tuning(order.block_m, a.dtype, gated)
    block_k = tuning.block_k if block is None else min(tuning.block_k, block[1])
    block_n = min(tuning.block_n, max(16, next_power_of_2(n)))
    scaled = 0 if w_scale is None else 1 if block is None else 2
    _grouped_kernel[(cdiv(n, block_n), order.most_tiles)](
        a,
        w,
        out,
        a if a_scale is None else a_scale,
        w if w_scale is None else w_scale,
        order.pairs,
        order.tile_expert,
        order.tile_first,
        order.expert_end,
        a if weights is None else weights,
        K=size,
        N=n,
        TOP_K=top_k,
        GATED=gated,
        SCALED=scaled,
        GROUP_N=1 if block is None else block[0],
        GROUP_K=1 if block is None else block[1],
        BLOCK_M=order.block_m,
        BLOCK_N=block_n,
        BLOCK_K=min(block_k, max(16, next_power_of_2(size))),
        STAGES=tuning.num_stages,
        PRECISION="ieee" if a.dtype == torch.float32 else "tf32",
        num_warps=tuning.num_warps,
        **early_launch(a.device),
    )
    return out
