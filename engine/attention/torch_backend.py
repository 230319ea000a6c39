"""Reference attention in plain torch: any block size, any device, float32 inside."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention.base import AttentionMetadata

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def to_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in the cache's dtype; 8-bit floats have no infinity, so what is too large is cut."""
    if dtype != FP8:
        return x.to(dtype)
    return x.float().clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _gathered(cache: Tensor, blocks: Tensor) -> Tensor:
    """Blocks of a cache in float32; torch cannot index 8-bit floats."""
    if cache.dtype != FP8:
        return cache[blocks].float()
    return cache.view(torch.uint8)[blocks].view(FP8).float()


def store_kv(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write k, v [T, Hkv, D] to their slots of `kv_cache`; rows with slot -1 are not written."""
    valid = slot_mapping >= 0
    # No boolean index: it would make the host wait. A padded row repeats the first valid row's
    # write instead, and where there is none, slot 0 is written with what it already holds.
    first = valid.to(torch.int8).argmax().view(1)
    slots = torch.where(valid, slot_mapping, slot_mapping.index_select(0, first)).clamp(min=0)
    mask = valid[:, None, None]
    for new, cache in ((k, kv_cache[0]), (v, kv_cache[1])):
        stored = to_stored(new, cache.dtype)
        if cache.dtype == FP8:
            stored, cache = stored.view(torch.uint8), cache.view(torch.uint8)
        flat = cache.flatten(0, 1)
        value = torch.where(mask, stored, stored.index_select(0, first))
        flat.index_copy_(0, slots, torch.where(valid.any(), value, flat[:1]))


class TorchAttention:
    """The reference that every other backend is compared with."""

    name = "torch"

    def check(
        self, head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Every size is served."""

    def prepare(self, meta: AttentionMetadata) -> AttentionMetadata:
        """Nothing is shared between layers."""
        return meta

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        kv_cache: Tensor,
        meta: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        """See AttentionBackend."""
        if k is not None and v is not None:
            store_kv(k, v, kv_cache, meta.slot_mapping)
        out = torch.empty_like(q)
        n = meta.num_decodes
        if n:
            out[:n] = _decode(q[:n], kv_cache, meta, scale)
        if meta.num_chunks:
            _chunks(q[n:], kv_cache, meta, scale, out[n:])
        return out


def _decode(q: Tensor, kv_cache: Tensor, meta: AttentionMetadata, scale: float) -> Tensor:
    """One query row per sequence, all sequences at once over their gathered keys."""
    lens = meta.decode_context_lens
    # On a GPU the bound is the host's, so that no value has to come back from the device.
    bound = meta.max_decode_context if q.is_cuda else int(lens.max())
    columns = -(-bound // kv_cache.shape[2]) or 1
    tables = meta.decode_block_tables[:, :columns].long().clamp(min=0)
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = kv_cache.shape[3]
    k, v = (_gathered(cache, tables).flatten(1, 2) for cache in (kv_cache[0], kv_cache[1]))
    grouped = q.float().view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("bhgd,bnhd->bhgn", grouped, k) * scale
    visible = torch.arange(k.shape[1], device=q.device)[None, :] < lens[:, None]  # [B, N]
    scores = scores.masked_fill(~visible[:, None, None, :], float("-inf"))
    # Padded rows see no key at all: their softmax is defined as zero. The values are masked too,
    # since what lies in an unwritten slot may not be a number.
    weights = torch.softmax(scores, dim=-1).masked_fill((lens == 0)[:, None, None, None], 0.0)
    v = v.masked_fill(~visible[:, :, None, None], 0.0)
    return torch.einsum("bhgn,bnhd->bhgd", weights, v).reshape(q.shape).to(q.dtype)


def _chunks(
    q: Tensor, kv_cache: Tensor, meta: AttentionMetadata, scale: float, out: Tensor
) -> None:
    """Each chunk attends to its sequence's earlier tokens and, causally, to itself."""
    assert meta.cu_seqlens_q is not None
    assert meta.chunk_context_lens is not None
    assert meta.chunk_block_tables is not None
    bounds = meta.cu_seqlens_q.tolist()
    block_size, group = kv_cache.shape[2], q.shape[1] // kv_cache.shape[3]
    for i, context in enumerate(meta.chunk_context_lens.tolist()):
        rows = slice(bounds[i], bounds[i + 1])
        blocks = meta.chunk_block_tables[i, : -(-context // block_size)].long()
        k, v = (
            _gathered(cache, blocks).flatten(0, 1)[:context].transpose(0, 1)
            for cache in (kv_cache[0], kv_cache[1])
        )
        queries = q[rows].float().transpose(0, 1)  # [Hq, n, D]
        num_queries = queries.shape[1]
        whole = num_queries == context
        mask = None if whole else _causal_mask(num_queries, context, q.device)
        attended = functional.scaled_dot_product_attention(
            queries[None],
            k.repeat_interleave(group, dim=0)[None],
            v.repeat_interleave(group, dim=0)[None],
            attn_mask=mask,
            is_causal=whole,
            scale=scale,
        )
        out[rows] = attended[0].transpose(0, 1).to(q.dtype)


def _causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    last_visible = torch.arange(num_keys - num_queries, num_keys, device=device)
    return torch.arange(num_keys, device=device)[None, :] <= last_visible[:, None]
