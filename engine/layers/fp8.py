"""Matrices and activations in 8-bit floats: quantisation, and the reference of their products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# A row of zeros needs a scale too; this one keeps its quotients finite.
SMALLEST_AMAX = 1e-10


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Activations [T, K] in 8-bit floats; `scale` is float32 [T, groups of columns]."""

    values: Tensor
    scale: Tensor
    dtype: torch.dtype  # of what was quantised, and of what products with it give

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""
        return self.values.shape

    def dequantised(self) -> Tensor:
        """The same numbers in float32."""
        values = self.values.float()
        return (values.unflatten(-1, (self.scale.shape[-1], -1)) * self.scale[..., None]).flatten(
            -2
        )


def quantise_rows(x: Tensor, group: int | None = None) -> QuantisedRows:
    """Each row, or each `group` columns of it, divided by its largest magnitude over 448."""
    groups = x.float().unflatten(-1, (-1, group or x.shape[-1]))
    scale = groups.abs().amax(-1).clamp(min=SMALLEST_AMAX) / FP8_MAX
    values = (groups / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return QuantisedRows(values.flatten(-2), scale, x.dtype)


def dequantised_matrix(weight: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """float32 [..., N, K] of 8-bit `weight`; `scale` is [..., N] or one per block."""
    if block is None:
        return weight.float() * scale[..., None]
    spread = scale.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return weight.float() * spread[..., : weight.shape[-2], : weight.shape[-1]]


class Fp8Matrix:
    """A quantised matrix for products with rows of activations.

    Off the GPU its dequantised numbers are kept once they were needed, so that a step costs what
    it does in float32.
    """

    def __init__(
        self, weight: Tensor, scale: Tensor, block: tuple[int, int] | None, fused: bool
    ) -> None:
        self.weight, self.scale, self.block, self.fused = weight, scale, block, fused
        self._plain: Tensor | None = None

    def quantised(self, x: Tensor | QuantisedRows) -> QuantisedRows:
        """`x` in the form that this matrix meets."""
        if isinstance(x, QuantisedRows):
            return x
        group = None if self.block is None else self.block[1]
        if self.fused:
            from engine.kernels.fp8_quantise import fused_quantise_rows

            return QuantisedRows(*fused_quantise_rows(x, group), x.dtype)
        return quantise_rows(x, group)

    def product(self, x: Tensor | QuantisedRows, bias: Tensor | None = None) -> Tensor:
        """x @ W.T + bias, in the dtype of the activations."""
        rows = self.quantised(x)
        if self.fused:
            from engine.kernels.fp8_product import fp8_product

            out = fp8_product(
                rows.values, rows.scale, self.weight, self.scale, self.block, rows.dtype
            )
            return out if bias is None else out + bias
        plain = functional.linear(rows.dequantised(), self.plain())
        return (plain if bias is None else plain + bias.float()).to(rows.dtype)

    def plain(self) -> Tensor:
        """The dequantised matrix in float32."""
        if self._plain is None:
            self._plain = dequantised_matrix(self.weight, self.scale, self.block)
        return self._plain
