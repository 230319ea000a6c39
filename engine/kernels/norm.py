# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202 (Triton gives its own meaning to annotations)
"""RMSNorm with and without the residual addition, one row per program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.sizes import next_power_of_2


@triton.jit
def _norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * SIZE
    offsets = tl.arange(0, BLOCK)
    mask = offsets < SIZE
    x = tl.load(x_ptr + row + offsets, mask=mask, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row + offsets, mask=mask, other=0.0)
        # The stream is kept in the tensors' dtype, and what is normalised is what is kept.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row + offsets, x, mask=mask)
    x = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    out = x * inverse * weight
    tl.store(out_ptr + row + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, early: bool = False
) -> tuple[Tensor, ...]:
    x = x.contiguous()
    size = x.shape[-1]
    block = next_power_of_2(size)
    out = torch.empty_like(x)
    total = out if residual is None else torch.empty_like(x)
    if x.numel():
        _norm_kernel[(x.numel() // size,)](
            x,
            x if residual is None else residual.contiguous(),
            weight,
            out,
            total,
            eps,
            SIZE=size,
            BLOCK=block,
            ADD=residual is not None,
            PDL=early,
            num_warps=min(16, max(1, block // 512)),
            **({"launch_pdl": True} if early else {}),
        )
    return out, total


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float, early: bool = False) -> Tensor:
    """See engine.layers.norm.rms_norm; `early` starts it before the kernel ahead has ended."""
    return _launch(x, None, weight, eps, early)[0]


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See engine.layers.norm.add_rms_norm."""
    out, total = _launch(x, residual, weight, eps)
    return out, total
