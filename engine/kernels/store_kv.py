# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202 (Triton gives its own meaning to annotations)
"""Writing keys and values to their slots of the paged cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.sizes import next_power_of_2


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _store_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_stride_t,
    v_stride_t,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    offsets = tl.arange(0, BLOCK)
    mask = offsets < SIZE
    k = tl.load(k_ptr + row * k_stride_t + offsets, mask=mask)
    v = tl.load(v_ptr + row * v_stride_t + offsets, mask=mask)
    if k_cache_ptr.dtype.element_ty == tl.float8e4nv:
        # 8-bit floats have no infinity: what is too large is cut.
        k = tl.clamp(k.to(tl.float32), -448.0, 448.0)
        v = tl.clamp(v.to(tl.float32), -448.0, 448.0)
    kind = k_cache_ptr.dtype.element_ty
    tl.store(k_cache_ptr + slot * SIZE + offsets, k.to(kind), mask=mask)
    tl.store(v_cache_ptr + slot * SIZE + offsets, v.to(kind), mask=mask)


def check_cache_layout(kv_cache: Tensor) -> None:
    """Heads, tokens and blocks of [2, blocks, block_size, Hkv, D] must lie side by side."""
    _, _, block_size, num_heads, head_dim = kv_cache.shape
    token = num_heads * head_dim
    assert kv_cache.stride()[1:] == (block_size * token, token, head_dim, 1), kv_cache.stride()


def store_kv(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write k, v [T, Hkv, D] (heads contiguous) into `kv_cache`; slot -1 is not written."""
    num_tokens, num_heads, head_dim = k.shape
    assert k.stride()[1:] == v.stride()[1:] == (head_dim, 1), "heads must lie side by side"
    size = num_heads * head_dim
    check_cache_layout(kv_cache)
    _store_kernel[(num_tokens,)](
        k,
        v,
        kv_cache[0],
        kv_cache[1],
        slot_mapping,
        k.stride(0),
        v.stride(0),
        SIZE=size,
        BLOCK=next_power_of_2(size),
    )
