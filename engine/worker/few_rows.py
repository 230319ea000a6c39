"""The forward pass of a decode step with few rows: five kernels a layer (seven beyond one row).

With few rows a step is a chain of short kernels, each of which reads its weights once. Fewer of
them, each starting to read before the one ahead has ended, is all that can be gained. Everything
is computed from the layers' own parameters, so nothing has to be kept in step with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention.base import AttentionMetadata
from engine.kernels.norm import fused_rms_norm
from engine.kernels.qkv_rope import qk_norm_rope_store
from engine.kernels.rows_attention import rows_attention
from engine.kernels.rows_dot import rows_dot
from engine.kernels.rows_linear import can_launch_dependents, rows_linear
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.mlp import SwiGLU
from engine.layers.norm import RMSNorm
from engine.layers.self_attention import SelfAttention
from engine.models.decoder import Decoder, DecoderLayer

MOST_ROWS = 16
# Beyond, long contexts are walked faster by the kernel of large batches.
_MOST_ROWS_IN_ONE = 8
_DTYPES = (torch.bfloat16, torch.float16)


class FewRows:
    """Takes over the decode steps of up to MOST_ROWS rows of a model that `serves` accepts."""

    def __init__(self, num_kv_heads: int, device: torch.device) -> None:
        self._arrived = torch.zeros(MOST_ROWS * num_kv_heads, dtype=torch.int32, device=device)

    def takes(self, meta: AttentionMetadata, num_tokens: int) -> bool:
        """Whether a step is one of few decodes and nothing else."""
        return num_tokens == meta.num_decodes <= MOST_ROWS and meta.work is None

    def forward(
        self,
        model: Decoder,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        meta: AttentionMetadata,
    ) -> Tensor:
        """As the model's own; the output of padded rows means nothing."""
        x = functional.embedding(input_ids, model.embedding.weight)
        for layer, kv_cache in zip(model.layers, kv_caches, strict=True):
            assert isinstance(layer, DecoderLayer)
            x = self._layer(layer, x, positions, model.cos_sin, kv_cache, meta)
        norm: Tensor = model.norm(x)
        return norm

    def takes_logits(self, num_rows: int) -> bool:
        """Whether the head of a step with so few samples runs here too."""
        return num_rows <= MOST_ROWS

    def logits(self, model: Decoder, hidden: Tensor) -> Tensor:
        """As `Decoder.compute_local_logits`."""
        table = model.head.table
        return _product(hidden, table.weight)[:, : table.rows.size]

    def _layer(
        self,
        layer: DecoderLayer,
        x: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv_cache: Tensor,
        meta: AttentionMetadata,
    ) -> Tensor:
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(mlp, SwiGLU)
        qkv = _normed(x, layer.input_norm, attention.qkv)
        attended = self._attend(attention, qkv, positions, cos_sin, kv_cache, meta)
        x = _product(attended, attention.out.weight, attention.out.bias, residual=x)
        gated = _normed(x, layer.post_norm, mlp.gate_up, gated=True)
        return _product(gated, mlp.down.weight, mlp.down.bias, residual=x)

    def _attend(
        self,
        attention: SelfAttention,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv_cache: Tensor,
        meta: AttentionMetadata,
    ) -> Tensor:
        """The attended heads [R, Hq D]; this step's keys and values go to the cache."""
        num_rows = qkv.shape[0]
        heads = (attention.q_norm, attention.k_norm, attention.shape.eps, cos_sin, positions)
        if num_rows > _MOST_ROWS_IN_ONE:
            q = qk_norm_rope_store(qkv, *heads, kv_cache, meta.slot_mapping)
            out = attention.backend.forward(q, None, None, kv_cache, meta, attention.scale)
            return out.view(num_rows, -1)
        return rows_attention(
            qkv,
            *heads,
            kv_cache,
            meta.slot_mapping,
            meta.decode_block_tables,
            meta.decode_context_lens,
            attention.scale,
            self._arrived,
        ).view(num_rows, -1)


def _normed(x: Tensor, norm: RMSNorm, linear: ColumnParallelLinear, gated: bool = False) -> Tensor:
    """The product of the normalised x; at one row the norm is part of it."""
    if x.shape[0] == 1:
        return rows_linear(
            x, linear.weight, linear.bias, gain=norm.weight, eps=norm.eps, gated=gated
        )
    x = fused_rms_norm(x, norm.weight, norm.eps, early=can_launch_dependents(x.device))
    return rows_dot(x, linear.weight, linear.bias, gated=gated)


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Plain arithmetic keeps up with the memory at one row only."""
    run = rows_linear if x.shape[0] == 1 else rows_dot
    return run(x, weight, bias, residual=residual)


def serves(model: Decoder, backend_name: str, kv_cache: Tensor) -> bool:
    """Whether a model is made of what `FewRows` computes: plain dense layers on one rank."""
    return (
        backend_name == "triton"
        and model.embedding.group.size == 1
        and model.head.table.weight.dtype == model.embedding.weight.dtype == kv_cache.dtype
        and all(_is_plain(layer, kv_cache) for layer in model.layers)
    )


def _is_plain(layer: torch.nn.Module, kv_cache: Tensor) -> bool:
    assert isinstance(layer, DecoderLayer)
    attention, mlp = layer.attention, layer.mlp
    if type(mlp) is not SwiGLU or not attention.fused or attention.shape.head_dim % 16:
        return False
    projections = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
    return all(
        type(projection) in (ColumnParallelLinear, RowParallelLinear)
        and projection.weight.dtype in _DTYPES
        and projection.weight.dtype == kv_cache.dtype
        and projection.weight.shape[1] % 8 == 0
        for projection in projections
    )
