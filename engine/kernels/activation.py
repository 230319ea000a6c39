# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202 (Triton gives its own meaning to annotations)
"""silu(gate) * up in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.sizes import cdiv, next_power_of_2

_BLOCK = 1024


@triton.jit
def _silu_mul_kernel(x_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < SIZE
    gate = tl.load(x_ptr + row * 2 * SIZE + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * SIZE + SIZE + offsets, mask=mask, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * SIZE + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


def fused_silu_mul(gate_up: Tensor) -> Tensor:
    """See engine.layers.mlp.silu_mul."""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    rows = out.numel() // size
    if rows:
        block = min(_BLOCK, next_power_of_2(size))
        grid = (rows, cdiv(size, block))
        _silu_mul_kernel[grid](gate_up, out, SIZE=size, BLOCK=block, num_warps=4)
    return out
