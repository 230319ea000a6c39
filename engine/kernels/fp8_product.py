# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202 (Triton gives its own meaning to annotations)
"""Products of 8-bit activations and 8-bit matrices, scaled while or after they are summed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.dependents import early_launch
from engine.kernels.sizes import cdiv, next_power_of_2

# From so many rows on the library's product is the faster one, with a scale per row and column.
LIBRARY_ROWS = 96
# Up to here the matrix is brought into the second-level cache before the rows are there.
_FEW_ROWS = 16
# The block and the numbers of rows for which the library was seen to multiply with blocks.
_LIBRARY_BLOCK, _ROW_STEP = (128, 128), 16


@dataclass(frozen=True, slots=True)
class ProductTuning:
    """Launch parameters of one product."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@cache
def default_tuning(rows: int, n: int) -> ProductTuning:
    """Few rows are about reading the matrix: narrow tiles put it on every multiprocessor."""
    if rows <= _FEW_ROWS:
        if n <= 8192:
            return ProductTuning(16, 16, 256, num_warps=2, num_stages=5)
        return ProductTuning(16, 64, 256, num_warps=4, num_stages=4)
    if rows < LIBRARY_ROWS:
        if n <= 8192:
            return ProductTuning(64, 32, 256, num_warps=4, num_stages=3)
        return ProductTuning(64, 64, 128, num_warps=4, num_stages=4)
    return ProductTuning(128, 128, 128, num_warps=8, num_stages=4)


@triton.jit
def _prefetch(addresses):
    """Bring cache lines into the second-level cache; their values are not read."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [addresses],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _fp8_product_kernel(
    a_ptr,
    w_ptr,
    out_ptr,
    a_scale_ptr,
    w_scale_ptr,
    num_rows,
    K: tl.constexpr,
    N: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCKED: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_offsets = tl.arange(0, BLOCK_K)
    live, n_mask = m < num_rows, n < N
    groups: tl.constexpr = K // GROUP_K
    a_at = a_ptr + (m.to(tl.int64) * K)[:, None] + k_offsets[None, :]
    w_at = w_ptr + (n.to(tl.int64) * K)[None, :] + k_offsets[:, None]
    if PDL:
        line: tl.constexpr = 128  # 8-bit numbers in a cache line
        ahead = tl.arange(0, 8) * line
        early = w_ptr + (n.to(tl.int64) * K)[:, None] + ahead[None, :]
        _prefetch(tl.where(n_mask[:, None] & (ahead < K)[None, :], early, w_ptr).to(tl.int64))
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            a = tl.load(a_at + k, mask=live[:, None], other=0.0)
            w = tl.load(w_at + k, mask=n_mask[None, :], other=0.0)
        else:
            k_mask = k + k_offsets < K
            a = tl.load(a_at + k, mask=live[:, None] & k_mask[None, :], other=0.0)
            w = tl.load(w_at + k, mask=n_mask[None, :] & k_mask[:, None], other=0.0)
        if BLOCKED:
            group = k // GROUP_K
            a_scale = tl.load(a_scale_ptr + m * groups + group, mask=live, other=0.0)
            w_scale = tl.load(w_scale_ptr + (n // GROUP_N) * groups + group, mask=n_mask, other=0.0)
            acc += tl.dot(a, w) * a_scale[:, None] * w_scale[None, :]
        else:
            acc = tl.dot(a, w, acc)
    if not BLOCKED:
        a_scale = tl.load(a_scale_ptr + m, mask=live, other=0.0)
        w_scale = tl.load(w_scale_ptr + n, mask=n_mask, other=0.0)
        acc = acc * a_scale[:, None] * w_scale[None, :]
    at = out_ptr + (m.to(tl.int64) * N)[:, None] + n[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & n_mask[None, :])


def triton_product(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    block: tuple[int, int] | None,
    dtype: torch.dtype,
    tuning: ProductTuning | None = None,
) -> Tensor:
    """a @ w.T of 8-bit a [M, K] and w [N, K]; see `fp8_product` for the scales."""
    rows, size = a.shape
    n = w.shape[0]
    out = torch.empty((rows, n), dtype=dtype, device=a.device)
    if rows == 0:
        return out
    if tuning is None:
        tuning = default_tuning(rows, n)
    block_k = min(tuning.block_k, max(32, next_power_of_2(size)))
    _fp8_product_kernel[(cdiv(n, tuning.block_n), cdiv(rows, tuning.block_m))](
        a,
        w,
        out,
        a_scale,
        w_scale,
        rows,
        K=size,
        N=n,
        GROUP_N=1 if block is None else block[0],
        GROUP_K=size if block is None else block[1],
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        BLOCK_K=block_k if block is None else min(block_k, block[1]),
        STAGES=tuning.num_stages,
        BLOCKED=block is not None,
        num_warps=tuning.num_warps,
        **early_launch(a.device, rows <= _FEW_ROWS),
    )
    return out


def library_product(
    a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """The same by torch, with one scale per row and column."""
    return torch._scaled_mm(
        a, w.t(), scale_a=a_scale, scale_b=w_scale[None, :], out_dtype=dtype, use_fast_accum=True
    )


def library_block_product(
    a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, out: Tensor
) -> None:
    """The same into `out`, with scales per 128 columns of a row and per block of 128 x 128."""
    # The library wants the rows' scales side by side for each group of columns.
    columns = a_scale.t().contiguous().t()
    torch._scaled_mm(a, w.t(), scale_a=columns, scale_b=w_scale.t(), out_dtype=out.dtype, out=out)


@cache
def has_library_blocks(device: torch.device) -> bool:
    """Whether this torch multiplies with a scale per block; found out by trying once."""
    if device.type != "cuda":
        return False
    a = torch.zeros(_ROW_STEP, 128, dtype=torch.float8_e4m3fn, device=device)
    w = torch.zeros(128, 128, dtype=torch.float8_e4m3fn, device=device)
    scales = (torch.ones(n, 1, device=device) for n in (_ROW_STEP, 1))
    out = torch.empty(_ROW_STEP, 128, dtype=torch.bfloat16, device=device)
    try:
        library_block_product(a, next(scales), w, next(scales), out)
    except (RuntimeError, ValueError):
        return False
    return True


def _block_product(
    a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Whole steps of rows by the library, the few that are left by the project's own kernel."""
    whole = a.shape[0] // _ROW_STEP * _ROW_STEP
    out = torch.empty((a.shape[0], w.shape[0]), dtype=dtype, device=a.device)
    library_block_product(a[:whole], a_scale[:whole], w, w_scale, out[:whole])
    if whole < a.shape[0]:
        rest = triton_product(a[whole:], a_scale[whole:], w, w_scale, _LIBRARY_BLOCK, dtype)
        out[whole:].copy_(rest)
    return out


def fp8_product(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    block: tuple[int, int] | None,
    dtype: torch.dtype,
) -> Tensor:
    """a @ w.T by whichever way is faster for so many rows.

    Without `block` the scales are [M, 1] and [N]; with it [M, K / block[1]] and one per block.
    """
    is_many = a.shape[0] > _FEW_ROWS and dtype == torch.bfloat16
    # cuBLAS reads the blocks' scales in columns of a multiple of 4, and beyond the end of others.
    fits = block == _LIBRARY_BLOCK and a_scale.shape[1] % 4 == 0
    if fits and is_many and has_library_blocks(a.device):
        return _block_product(a, a_scale, w, w_scale, dtype)
    suits_library = block is None and dtype == torch.bfloat16 and a.is_cuda
    if suits_library and a.shape[0] >= LIBRARY_ROWS and a.shape[1] % 16 == w.shape[0] % 16 == 0:
        return library_product(a, a_scale, w, w_scale, dtype)
    return triton_product(a, a_scale, w, w_scale, block, dtype)
