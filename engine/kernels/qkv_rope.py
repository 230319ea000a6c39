# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202 (Triton gives its own meaning to annotations)
"""Head norms, rotation and the KV write in one pass over the fused QKV projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.sizes import cdiv, next_power_of_2
from engine.kernels.store_kv import check_cache_layout

_HEADS_PER_PROGRAM = 8


@triton.jit
def _quantised(x, inverse_scale):
    """8-bit floats have no infinity: what is too large is cut."""
    return tl.clamp(x.to(tl.float32) * inverse_scale, -448.0, 448.0).to(tl.float8e4nv)


@triton.jit(
    do_not_specialize=["k_inverse_scale", "v_inverse_scale"],
    do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"],
)
def _qkv_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    eps,
    k_inverse_scale,
    v_inverse_scale,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
):
    """One program takes HEADS heads of one token, as two tiles: the halves that rotate together."""
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = D // 2
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, HALF_BLOCK)[None, :]
    d_mask = d < half
    mask = (head < HQ + 2 * HKV) & d_mask
    source = qkv_ptr + token * (HQ + 2 * HKV) * D + head * D + d
    first_raw = tl.load(source, mask=mask, other=0.0)
    second_raw = tl.load(source + half, mask=mask, other=0.0)
    first, second = first_raw.to(tl.float32), second_raw.to(tl.float32)
    is_q = head < HQ
    if NORM:
        total = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        inverse = tl.rsqrt(total / D + eps)[:, None]
        qw1 = tl.load(q_weight_ptr + d, mask=d_mask, other=0.0).to(tl.float32)
        qw2 = tl.load(q_weight_ptr + half + d, mask=d_mask, other=0.0).to(tl.float32)
        kw1 = tl.load(k_weight_ptr + d, mask=d_mask, other=0.0).to(tl.float32)
        kw2 = tl.load(k_weight_ptr + half + d, mask=d_mask, other=0.0).to(tl.float32)
        first = first * inverse * tl.where(is_q, qw1, kw1)
        second = second * inverse * tl.where(is_q, qw2, kw2)
    position = tl.load(positions_ptr + token)
    cos = tl.load(cos_sin_ptr + position * D + d, mask=d_mask, other=0.0)
    sin = tl.load(cos_sin_ptr + position * D + half + d, mask=d_mask, other=0.0)
    rotated_first = (first * cos - second * sin).to(q_out_ptr.dtype.element_ty)
    rotated_second = (second * cos + first * sin).to(q_out_ptr.dtype.element_ty)
    q_target = q_out_ptr + token * HQ * D + head * D + d
    tl.store(q_target, rotated_first, mask=mask & is_q)
    tl.store(q_target + half, rotated_second, mask=mask & is_q)
    slot = tl.load(slots_ptr + token)
    if k_cache_ptr.dtype.element_ty == tl.float8e4nv:
        rotated_first = _quantised(rotated_first, k_inverse_scale)
        rotated_second = _quantised(rotated_second, k_inverse_scale)
        first_raw = _quantised(first_raw, v_inverse_scale)
        second_raw = _quantised(second_raw, v_inverse_scale)
    if slot >= 0:
        is_k = (head >= HQ) & (head < HQ + HKV)
        k_target = k_cache_ptr + slot * HKV * D + (head - HQ) * D + d
        tl.store(k_target, rotated_first, mask=mask & is_k)
        tl.store(k_target + half, rotated_second, mask=mask & is_k)
        is_v = head >= HQ + HKV
        v_target = v_cache_ptr + slot * HKV * D + (head - HQ - HKV) * D + d
        tl.store(v_target, first_raw, mask=mask & is_v)
        tl.store(v_target + half, second_raw, mask=mask & is_v)


def qk_norm_rope_store(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """Rotated queries [T, Hq, D]; keys and values go to the slots of `slot_mapping` in `kv_cache`.

    `qkv` is [T, (Hq + 2 Hkv) D]. Without norm weights the heads are only rotated.
    A cache of 8-bit floats holds keys and values divided by `kv_scales`.
    """
    num_kv_heads, head_dim = kv_cache.shape[3:]
    num_tokens, width = qkv.shape
    num_heads = width // head_dim - 2 * num_kv_heads
    assert qkv.is_contiguous()
    check_cache_layout(kv_cache)
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return q
    total_heads = num_heads + 2 * num_kv_heads
    heads = min(_HEADS_PER_PROGRAM, next_power_of_2(total_heads))
    norm = q_norm is not None and k_norm is not None
    _qkv_kernel[(num_tokens, cdiv(total_heads, heads))](
        qkv,
        q_norm if norm else qkv,
        k_norm if norm else qkv,
        cos_sin,
        positions,
        slot_mapping,
        q,
        kv_cache[0],
        kv_cache[1],
        eps,
        1.0 / kv_scales[0],
        1.0 / kv_scales[1],
        HQ=num_heads,
        HKV=num_kv_heads,
        D=head_dim,
        HALF_BLOCK=next_power_of_2(head_dim // 2),
        HEADS=heads,
        NORM=norm,
        num_warps=4,
    )
    return q
