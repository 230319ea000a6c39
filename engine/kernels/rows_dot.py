# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202 (Triton gives its own meaning to annotations)
"""As `rows_linear`, on the matrix units: for more rows than plain arithmetic keeps up with.

The weights are the left operand, 16 of their rows to a program or a few times as many, and the rows
of x the columns of the right one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.rows_linear import can_launch_dependents
from engine.kernels.sizes import cdiv, next_power_of_2

MOST_ROWS = 16


@dataclass(frozen=True, slots=True)
class DotTuning:
    """Launch parameters."""

    block_n: int  # rows of W (of gate and of up each, if gated) per program
    block_k: int  # columns per iteration
    num_warps: int
    num_stages: int


def default_tuning(in_features: int, out_features: int, gated: bool) -> DotTuning:
    """Enough weights under way on every multiprocessor."""
    if gated or out_features > 65536:
        return DotTuning(block_n=32, block_k=128, num_warps=2, num_stages=6)
    return DotTuning(block_n=16, block_k=256, num_warps=1, num_stages=5)


@triton.jit
def _prefetch(ptrs):
    """Bring the cache lines at `ptrs` into the second-level cache; their values are not read."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [ptrs],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _rows_dot_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    r = tl.arange(0, ROWS)
    n_mask = n < N
    w_at = weight_ptr + n.to(tl.int64)[:, None] * K
    up: tl.constexpr = N * K  # from a row of the gate to its row of the up projection
    dtype = out_ptr.dtype.element_ty
    if PDL:
        line: tl.constexpr = 64  # 16-bit numbers in a cache line
        ahead = tl.arange(0, 4 * BLOCK_K // line) * line
        early = tl.where(n_mask[:, None] & (ahead < K)[None, :], w_at + ahead[None, :], w_at)
        early = tl.where(n_mask[:, None], early, weight_ptr)
        _prefetch(early.to(tl.int64))
        if GATED:
            _prefetch(tl.where(n_mask[:, None], early + up, weight_ptr).to(tl.int64))
        gdc_wait()
        gdc_launch_dependents()
    y = tl.zeros([BLOCK_N, ROWS], tl.float32)
    z = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        column = start + k
        k_mask = column < K
        w_mask = n_mask[:, None] & k_mask[None, :]
        w = tl.load(w_at + column[None, :], mask=w_mask, other=0.0)
        x_mask = k_mask[:, None] & (r < num_rows)[None, :]
        x = tl.load(x_ptr + r[None, :] * K + column[:, None], mask=x_mask, other=0.0)
        y = tl.dot(w, x, y, input_precision=PRECISION)
        if GATED:
            u = tl.load(w_at + up + column[None, :], mask=w_mask, other=0.0)
            z = tl.dot(u, x, z, input_precision=PRECISION)
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
    # Rounded where the separate kernels round.
    y = y.to(dtype)
    if GATED:
        if BIAS:
            z += tl.load(bias_ptr + N + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
        gate = y.to(tl.float32)
        y = (gate / (1.0 + tl.exp(-gate)) * z.to(dtype).to(tl.float32)).to(dtype)
    at = r[None, :] * N + n[:, None]
    mask = (r < num_rows)[None, :] & n_mask[:, None]
    if RESIDUAL:
        residual = tl.load(residual_ptr + at, mask=mask, other=0.0)
        y = (y.to(tl.float32) + residual.to(tl.float32)).to(dtype)
    tl.store(out_ptr + at, y, mask=mask)


def rows_dot(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    residual: Tensor | None = None,
    tuning: DotTuning | None = None,
) -> Tensor:
    """See `rows_linear`; up to MOST_ROWS rows, and without the norm.

    (The norm inside would cost each program a pass through registers for every piece of x: 21
    instead of 14 us for the projections of an 8B layer.)
    """
    num_rows, in_features = x.shape
    assert num_rows <= MOST_ROWS
    assert x.is_contiguous()
    assert weight.is_contiguous()
    out_features = weight.shape[0] // (2 if gated else 1)
    tuning = tuning or default_tuning(in_features, out_features, gated)
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    pdl = can_launch_dependents(x.device)
    _rows_dot_kernel[(cdiv(out_features, tuning.block_n),)](
        x,
        weight,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        num_rows,
        N=out_features,
        K=in_features,
        ROWS=max(8, next_power_of_2(num_rows)),
        BLOCK_N=tuning.block_n,
        BLOCK_K=tuning.block_k,
        STAGES=tuning.num_stages,
        GATED=gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        PDL=pdl,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tuning.num_warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
