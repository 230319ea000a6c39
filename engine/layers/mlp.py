"""The gated feed-forward block (SwiGLU)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.distributed.group import TpGroup
from engine.layers.fp8 import QuantisedRows
from engine.layers.fp8_config import Fp8Config
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear, merged_parts
from engine.layers.weights import WeightSlice


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for rows that hold gate and up side by side; the reference."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (functional.silu(gate.float()) * up.float()).to(gate_up.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one matrix product."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        group: TpGroup,
        dtype: torch.dtype,
        device: torch.device,
        fused: bool,
        fp8: Fp8Config | None = None,
    ) -> None:
        super().__init__()
        self.fused, self.fp8 = fused, fp8
        parts = merged_parts(("gate_proj", "up_proj"), intermediate_size, group)
        self.gate_up = ColumnParallelLinear(hidden_size, parts, bias, dtype, device, fp8, fused)
        self.down = RowParallelLinear(
            intermediate_size, hidden_size, bias, group, dtype, device, fp8, fused
        )

    def forward(self, x: Tensor | QuantisedRows) -> Tensor:
        """The block's output [T, H], equal on every rank."""
        gate_up = self.gate_up(x)
        if self.fused and self.fp8 is not None:
            from engine.kernels.fp8_quantise import fused_silu_mul_quantise

            values, scale = fused_silu_mul_quantise(gate_up, self.fp8.group)
            return self.down(QuantisedRows(values, scale, gate_up.dtype))
        if self.fused:
            from engine.kernels.activation import fused_silu_mul

            return self.down(fused_silu_mul(gate_up))
        return self.down(silu_mul(gate_up))

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Slices of the three projections."""
        yield from self.gate_up.weight_slices(prefix)
        yield from self.down.weight_slices(f"{prefix}down_proj.")
