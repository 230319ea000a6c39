"""Paged attention by FlashAttention-2, where it is installed."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import torch
from torch import Tensor

from engine.attention.base import AttentionMetadata
from engine.attention.torch_backend import store_kv as store_kv_torch
from engine.core.errors import ConfigError

BLOCK_MULTIPLE = 256
MAX_HEAD_DIM = 256


class FlashAttention:
    """`flash_attn_with_kvcache` for decodes, `flash_attn_varlen_func` for chunks."""

    name = "flash_attn"

    def check(
        self, head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """FlashAttention-2 on CUDA, in half precision, with blocks of 256 tokens."""
        if importlib.util.find_spec("flash_attn") is None:
            raise ConfigError("attention_backend", self.name, "needs the package flash-attn")
        if device.type != "cuda":
            raise ConfigError("attention_backend", self.name, f"needs CUDA, not {device.type}")
        if block_size % BLOCK_MULTIPLE:
            limit = f"backend flash_attn needs a multiple of {BLOCK_MULTIPLE}"
            raise ConfigError("block_size", block_size, limit)
        if dtype not in (torch.bfloat16, torch.float16):
            raise ConfigError("dtype", str(dtype), "backend flash_attn needs bfloat16 or float16")
        if head_dim > MAX_HEAD_DIM or head_dim % 8:
            limit = f"backend flash_attn needs a multiple of 8 up to {MAX_HEAD_DIM}"
            raise ConfigError("head_dim", head_dim, limit)

    def prepare(self, meta: AttentionMetadata) -> AttentionMetadata:
        """The bounds of the chunks' keys."""
        if meta.chunk_context_lens is None:
            return meta
        bounds = torch.zeros(
            meta.num_chunks + 1, dtype=torch.int32, device=meta.slot_mapping.device
        )
        torch.cumsum(meta.chunk_context_lens, 0, dtype=torch.int32, out=bounds[1:])
        return replace(meta, cu_seqlens_k=bounds)

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
            _store(k, v, kv_cache, meta.slot_mapping)
        n = meta.num_decodes
        parts: list[Tensor] = []
        if n:
            parts.append(_decode(q[:n], kv_cache, meta, scale))
        if meta.num_chunks:
            parts.append(_chunks(q[n:], kv_cache, meta, scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _store(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    if importlib.util.find_spec("triton") is None:
        store_kv_torch(k, v, kv_cache, slot_mapping)
        return
    from engine.kernels.store_kv import store_kv

    store_kv(k, v, kv_cache, slot_mapping)


def _decode(q: Tensor, kv_cache: Tensor, meta: AttentionMetadata, scale: float) -> Tensor:
    from flash_attn import flash_attn_with_kvcache

    out: Tensor = flash_attn_with_kvcache(
        q[:, None],
        kv_cache[0],
        kv_cache[1],
        cache_seqlens=meta.decode_context_lens,
        block_table=meta.decode_block_tables,
        softmax_scale=scale,
        causal=True,
    )
    return out[:, 0]


def _chunks(q: Tensor, kv_cache: Tensor, meta: AttentionMetadata, scale: float) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    if meta.cu_seqlens_k is None:
        meta = FlashAttention().prepare(meta)
    out: Tensor = flash_attn_varlen_func(
        q,
        kv_cache[0],
        kv_cache[1],
        cu_seqlens_q=meta.cu_seqlens_q,
        cu_seqlens_k=meta.cu_seqlens_k,
        max_seqlen_q=meta.max_seqlen_q,
        max_seqlen_k=meta.max_seqlen_k,
        softmax_scale=scale,
        causal=True,
        block_table=meta.chunk_block_tables,
    )
    return out
