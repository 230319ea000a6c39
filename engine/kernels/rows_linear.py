# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202 (Triton gives its own meaning to annotations)
"""x @ W.T for few rows, with what stands around it: norm before, SiLU or residual after.

With so few rows the time is that of reading W once. A program takes some rows of W whole and loads
the first piece of them before it waits for the kernel ahead (programmatic dependent launch), so
memory is busy while that one ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.sizes import cdiv, next_power_of_2

MOST_ROWS = 8


@dataclass(frozen=True, slots=True)
class LinearTuning:
    """Launch parameters."""

    block_n: int  # rows of W (of gate and of up each, if gated) per program
    block_k: int  # columns per iteration
    num_warps: int


@cache
def default_tuning(in_features: int, out_features: int, gated: bool) -> LinearTuning:
    """Measured on an H200 (benchmarks/gpu_rows_linear.py): many small programs, whole rows of W."""
    if in_features <= 1024:
        return LinearTuning(block_n=4, block_k=1024, num_warps=2)
    narrow = gated or out_features <= 2048
    return LinearTuning(block_n=2 if narrow else 4, block_k=2048, num_warps=4)


@triton.jit(do_not_specialize=["num_rows"])
def _rows_linear_kernel(
    x_ptr,
    weight_ptr,
    gain_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row = tl.arange(0, ROWS)
    n_mask = n < N
    w_at = weight_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    up: tl.constexpr = N * K  # from a row of the gate to its row of the up projection
    w_mask = n_mask[:, None] & (k < K)[None, :]
    w = tl.load(w_at, mask=w_mask, other=0.0)
    u = w
    if GATED:
        u = tl.load(w_at + up, mask=w_mask, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    y = tl.zeros([ROWS, BLOCK_N], tl.float32)
    z = tl.zeros([ROWS, BLOCK_N], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    last: tl.constexpr = (K - 1) // BLOCK_K * BLOCK_K
    for start in tl.range(0, last + BLOCK_K, BLOCK_K, num_stages=1):
        w_now, u_now = w.to(tl.float32), u.to(tl.float32)
        if last > 0:  # the next piece is under way while this one is used
            then = start + BLOCK_K
            next_mask = n_mask[:, None] & (then + k < K)[None, :]
            w = tl.load(w_at + then, mask=next_mask, other=0.0)
            if GATED:
                u = tl.load(w_at + up + then, mask=next_mask, other=0.0)
        if NORM:
            gain = tl.load(gain_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        # Row by row: all products at once would not fit the registers.
        for r in tl.static_range(ROWS):
            x_mask = start + k < tl.where(r < num_rows, K, 0)
            x = tl.load(x_ptr + r * K + start + k, mask=x_mask, other=0.0).to(tl.float32)
            if NORM:
                squares += tl.where(row == r, tl.sum(x * x, axis=0), 0.0)
                x = x * gain
            here = (row == r)[:, None]
            y += tl.where(here, tl.sum(w_now * x[None, :], axis=1)[None, :], 0.0)
            if GATED:
                z += tl.where(here, tl.sum(u_now * x[None, :], axis=1)[None, :], 0.0)
    dtype = out_ptr.dtype.element_ty
    if NORM:
        inverse = tl.rsqrt(squares / K + eps)[:, None]
        y = y * inverse
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
    # Rounded where the separate kernels round.
    y = y.to(dtype)
    if GATED:
        if NORM:
            z = z * inverse
        if BIAS:
            z += tl.load(bias_ptr + N + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
        gate = y.to(tl.float32)
        y = (gate / (1.0 + tl.exp(-gate)) * z.to(dtype).to(tl.float32)).to(dtype)
    at = row[:, None] * N + n[None, :]
    mask = (row < num_rows)[:, None] & n_mask[None, :]
    if RESIDUAL:
        residual = tl.load(residual_ptr + at, mask=mask, other=0.0)
        y = (y.to(tl.float32) + residual.to(tl.float32)).to(dtype)
    tl.store(out_ptr + at, y, mask=mask)


@cache
def can_launch_dependents(device: torch.device) -> bool:
    """Whether a kernel may start before the one ahead of it has ended (from Hopper on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def rows_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gain: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
    tuning: LinearTuning | None = None,
) -> Tensor:
    """x @ weight.T + bias for up to MOST_ROWS rows of x [R, K].

    With `gain`, x is first normalised as `rms_norm(x, gain, eps)` does. `gated` weights hold gate
    and up, and silu(gate) * up is returned. `residual` is added to what the product rounds to.
    """
    num_rows, in_features = x.shape
    assert num_rows <= MOST_ROWS
    assert x.is_contiguous()
    assert weight.is_contiguous()
    out_features = weight.shape[0] // (2 if gated else 1)
    rows = next_power_of_2(num_rows)
    tuning = tuning or default_tuning(in_features, out_features, gated)
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    pdl = can_launch_dependents(x.device)
    _rows_linear_kernel[(cdiv(out_features, tuning.block_n),)](
        x,
        weight,
        x if gain is None else gain,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        num_rows,
        eps,
        N=out_features,
        K=in_features,
        ROWS=rows,
        BLOCK_N=tuning.block_n,
        BLOCK_K=tuning.block_k,
        NORM=gain is not None,
        GATED=gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        PDL=pdl,
        num_warps=tuning.num_warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
