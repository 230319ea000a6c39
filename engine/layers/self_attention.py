"""The attention block of a dense decoder: projections, head norms, rotation, paged attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.attention.base import AttentionBackend, AttentionMetadata
from engine.distributed.group import TpGroup
from engine.layers.fp8 import QuantisedRows
from engine.layers.fp8_config import Fp8Config
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear, qkv_parts
from engine.layers.norm import rms_norm
from engine.layers.rope import apply_rope
from engine.layers.weights import WeightSlice


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Full (unsharded) sizes of one attention block."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    eps: float


class SelfAttention(nn.Module):
    """One attention block; writes this step's keys and values into the layer's cache."""

    def __init__(
        self,
        shape: AttentionShape,
        group: TpGroup,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        fused: bool,
        qkv_fp8: Fp8Config | None = None,
        out_fp8: Fp8Config | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.backend, self.fused = shape, backend, fused
        self.scale = shape.head_dim**-0.5
        self.kv_scales = (1.0, 1.0)  # of a cache of 8-bit floats
        parts = qkv_parts(shape.num_heads, shape.num_kv_heads, shape.head_dim, group)
        self.num_heads = parts[0].rows.size // shape.head_dim
        self.num_kv_heads = parts[1].rows.size // shape.head_dim
        self.qkv = ColumnParallelLinear(
            shape.hidden_size, parts, shape.qkv_bias, dtype, device, qkv_fp8, fused
        )
        self.out = RowParallelLinear(
            shape.num_heads * shape.head_dim,
            shape.hidden_size,
            shape.o_bias,
            group,
            dtype,
            device,
            out_fp8,
            fused,
        )
        norm_size = (shape.head_dim,)
        self.q_norm = self.k_norm = None
        if shape.qk_norm:
            self.q_norm = nn.Parameter(torch.empty(norm_size, dtype=dtype, device=device), False)
            self.k_norm = nn.Parameter(torch.empty(norm_size, dtype=dtype, device=device), False)

    def forward(
        self,
        x: Tensor | QuantisedRows,
        positions: Tensor,
        cos_sin: Tensor,
        kv_cache: Tensor,
        meta: AttentionMetadata,
    ) -> Tensor:
        """The block's output [T, H]; `cos_sin` is the whole table, indexed by `positions`."""
        qkv = self.qkv(x)
        k: Tensor | None = None
        v: Tensor | None = None
        if self.fused:
            from engine.kernels.qkv_rope import qk_norm_rope_store

            q = qk_norm_rope_store(
                qkv, self.q_norm, self.k_norm, self.shape.eps, cos_sin, positions, kv_cache,
                meta.slot_mapping, self.kv_scales,
            )  # fmt: skip
        else:
            q, k, v = self._split(qkv, cos_sin[positions])
            if self.kv_scales != (1.0, 1.0):
                k, v = k / self.kv_scales[0], v / self.kv_scales[1]
        # The scale of the keys is part of the scores' scale, that of the values of the output's.
        out = self.backend.forward(q, k, v, kv_cache, meta, self.scale * self.kv_scales[0])
        if self.kv_scales[1] != 1.0:
            out = out * self.kv_scales[1]
        return self.out(out.reshape(x.shape[0], -1))

    def _split(self, qkv: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Reference form of the fused kernel, without the store."""
        heads = qkv.view(qkv.shape[0], -1, self.shape.head_dim)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q = rms_norm(q, self.q_norm, self.shape.eps)
            k = rms_norm(k, self.k_norm, self.shape.eps)
        return apply_rope(q, rows), apply_rope(k, rows), v

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Slices of the four projections and, where the model has them, the head norms."""
        yield from self.qkv.weight_slices(prefix)
        yield from self.out.weight_slices(f"{prefix}o_proj.")
        for name, weight in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if weight is not None:
                yield WeightSlice(f"{prefix}{name}.weight", weight, tuple(weight.shape))
