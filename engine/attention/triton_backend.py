"""Paged attention by this project's Triton kernels: any block size that is a multiple of 16."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import torch
from torch import Tensor

from engine.attention.base import AttentionMetadata
from engine.core.errors import ConfigError

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
BLOCK_MULTIPLE = 16
# Fewer rows are split into parts of equal work anyway.
MIN_ROWS_TO_ORDER = 32


class TritonAttention:
    """Store-KV, paged prefill and split-KV paged decode; safe under CUDA graphs."""

    name = "triton"

    def check(
        self, head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Triton on CUDA, block sizes of 16 tokens and head dims up to 256."""
        if importlib.util.find_spec("triton") is None:
            raise ConfigError("attention_backend", self.name, "needs the package triton")
        if device.type != "cuda":
            raise ConfigError("attention_backend", self.name, f"needs CUDA, not {device.type}")
        if block_size % BLOCK_MULTIPLE:
            raise ConfigError(
                "block_size", block_size, f"backend triton needs a multiple of {BLOCK_MULTIPLE}"
            )
        if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM or head_dim % 8:
            limit = f"a multiple of 8 from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
            raise ConfigError("head_dim", head_dim, f"backend triton needs {limit}")

    def prepare(self, meta: AttentionMetadata) -> AttentionMetadata:
        """Decodes are started longest first, so that no long one runs alone at the end."""
        if meta.work is not None or meta.num_decodes < MIN_ROWS_TO_ORDER:
            return meta
        order = torch.argsort(meta.decode_context_lens, descending=True)
        return replace(meta, decode_order=order)

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
        from engine.kernels.paged_decode import paged_decode
        from engine.kernels.paged_prefill import paged_prefill
        from engine.kernels.ragged import ragged_attention
        from engine.kernels.store_kv import store_kv

        if k is not None and v is not None:
            store_kv(k, v, kv_cache, meta.slot_mapping)
        if meta.work is not None:
            return ragged_attention(q, kv_cache, meta.work, scale)
        out = torch.empty_like(q)
        n = meta.num_decodes
        if n:
            paged_decode(
                q[:n],
                kv_cache,
                meta.decode_block_tables,
                meta.decode_context_lens,
                meta.max_decode_context,
                scale,
                out[:n],
                order=meta.decode_order,
            )
        if meta.num_chunks:
            assert meta.cu_seqlens_q is not None
            assert meta.chunk_block_tables is not None
            assert meta.chunk_context_lens is not None
            paged_prefill(
                q[n:],
                kv_cache,
                meta.chunk_block_tables,
                meta.chunk_context_lens,
                meta.cu_seqlens_q,
                meta.max_seqlen_q,
                meta.max_seqlen_k,
                scale,
                out[n:],
            )
        return out
