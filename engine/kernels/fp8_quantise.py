# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202 (Triton gives its own meaning to annotations)
"""Rows of activations to 8-bit floats with scales, alone or where they are made.

What is quantised is what would have been stored in the activations' dtype, so that the fused forms
give the numbers of the separate ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.dependents import early_launch
from engine.kernels.sizes import next_power_of_2


@triton.jit
def _store_quantised(
    values, values_ptr, scale_ptr, row, offsets, mask, groups, GROUPS: tl.constexpr
):
    """`values` float32 [groups, columns of a group]; the scales follow the reference."""
    amax = tl.max(tl.where(mask, tl.abs(values), 0.0), axis=1)
    scale = tl.maximum(amax, 1e-10) / 448.0
    quotient = tl.clamp(values / scale[:, None], -448.0, 448.0)
    tl.store(values_ptr + offsets, quotient.to(values_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + row * GROUPS + groups, scale, mask=groups < GROUPS)


@triton.jit
def _quantise_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    total_ptr,
    values_ptr,
    scale_ptr,
    eps,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: x, or its norm, or the norm of x + residual, or silu(gate) * up of two halves."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, BLOCK_GROUPS)
    inside = tl.arange(0, BLOCK)
    columns = groups[:, None] * GROUP + inside[None, :]
    mask = (groups < GROUPS)[:, None] & (inside < GROUP)[None, :]
    offsets = row * SIZE + columns
    if GATED:
        at = x_ptr + row * 2 * SIZE + columns
        gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(at + SIZE, mask=mask, other=0.0).to(tl.float32)
        x = gate / (1.0 + tl.exp(-gate)) * up
    else:
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
        if ADD:
            residual = tl.load(residual_ptr + offsets, mask=mask, other=0.0)
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(x_ptr.dtype.element_ty)
            tl.store(total_ptr + offsets, x, mask=mask)
        x = x.to(tl.float32)
        if NORM:
            inverse = tl.rsqrt(tl.sum(x * x) / SIZE + eps)
            x = x * inverse * tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    _store_quantised(x, values_ptr, scale_ptr, row, offsets, mask, groups, GROUPS)


def _launch(
    x: Tensor,
    group: int | None,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous()
    rows = x.shape[0]
    size = x.shape[1] // 2 if gated else x.shape[1]
    group = group or size
    groups = size // group
    assert groups * group == size, (size, group)
    values = torch.empty((rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    total = x if residual is None else torch.empty_like(x)
    if rows:
        block_groups, block = next_power_of_2(groups), next_power_of_2(group)
        _quantise_kernel[(rows,)](
            x,
            x if residual is None else residual.contiguous(),
            x if weight is None else weight,
            total,
            values,
            scale,
            eps,
            SIZE=size,
            GROUP=group,
            GROUPS=groups,
            BLOCK_GROUPS=block_groups,
            BLOCK=block,
            NORM=weight is not None,
            ADD=residual is not None,
            GATED=gated,
            num_warps=min(16, max(1, block_groups * block // 512)),
            **early_launch(x.device),
        )
    return values, scale, total


def fused_quantise_rows(x: Tensor, group: int | None) -> tuple[Tensor, Tensor]:
    """Values and scales of engine.layers.fp8.quantise_rows."""
    return _launch(x, group)[:2]


def fused_norm_quantise(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, group: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Values, scales and the stream of engine.layers.norm.add_rms_norm; x without a residual."""
    return _launch(x, group, residual, weight, eps)


def fused_silu_mul_quantise(gate_up: Tensor, group: int | None) -> tuple[Tensor, Tensor]:
    """Values and scales of engine.layers.mlp.silu_mul."""
    return _launch(gate_up, group, gated=True)[:2]
