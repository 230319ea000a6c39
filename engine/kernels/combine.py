# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202 (Triton gives its own meaning to annotations)
"""Joining the parts of a context that was split among programs."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.sizes import next_power_of_2

MOST_SPLITS = 64


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    part_ptr,
    lse_ptr,
    out_ptr,
    splits,
    D: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Weighted sum of one head's parts, by their log-sum-exp."""
    index = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, MOST)
    d = tl.arange(0, BLOCK_D)
    lse = tl.load(lse_ptr + index * splits + s, mask=s < splits, other=float("-inf"))
    top = tl.max(lse, axis=0)
    # Parts without keys weigh nothing; a padded row has no others.
    weight = tl.exp2(lse - tl.where(top > float("-inf"), top, 0.0))
    total = tl.sum(weight, axis=0)
    weight = weight / tl.where(total > 0, total, 1.0)
    mask = (d < D)[None, :] & (weight > 0)[:, None]
    part = tl.load(part_ptr + (index * splits + s)[:, None] * D + d[None, :], mask=mask, other=0.0)
    out = tl.sum(part * weight[:, None], axis=0)
    tl.store(out_ptr + index * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


def new_parts(q: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Room for the partial outputs [T, Hq, splits, D] and their log-sum-exp, for q [T, Hq, D]."""
    num_rows, num_heads, head_dim = q.shape
    shape = (num_rows, num_heads, splits)
    part = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
    return part, torch.empty(shape, dtype=torch.float32, device=q.device)


def combine_parts(part: Tensor, lse: Tensor, out: Tensor) -> None:
    """Write the weighted sums of the parts to `out` [T, Hq, D]; at most MOST_SPLITS of them."""
    num_rows, num_heads, splits, head_dim = part.shape
    assert splits <= MOST_SPLITS
    _combine_kernel[(num_rows * num_heads,)](
        part,
        lse,
        out,
        splits,
        D=head_dim,
        MOST=8 if splits <= 8 else MOST_SPLITS,
        BLOCK_D=next_power_of_2(head_dim),
        num_warps=4,
    )


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a device."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
