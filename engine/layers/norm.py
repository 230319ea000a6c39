"""RMSNorm, alone and fused with the residual addition; inputs are never written to."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.layers.fp8 import QuantisedRows
from engine.layers.fp8_config import Fp8Config
from engine.layers.linear import new_parameter
from engine.layers.weights import WeightSlice, whole


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension in float32 and scale by `weight`; the reference."""
    # In float32, .float() is x itself: nothing below may work in place.
    x32 = x.float()
    inverse = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * inverse * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); the reference."""
    total = x + residual
    return rms_norm(total, weight, eps), total


class RMSNorm(nn.Module):
    """Root mean square normalisation with an optional fused residual addition.

    With `fp8` the fused form gives its rows as the quantised matrices that read them need them.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        fused: bool,
        fp8: Fp8Config | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.fused = fused
        self.fp8 = fp8
        self.weight = new_parameter((size,), dtype, device)

    def forward(self, x: Tensor) -> Tensor | QuantisedRows:
        """The normalised x, in a new tensor."""
        if self.fused and self.fp8 is not None:
            return self._quantised(x, None)[0]
        if self.fused:
            from engine.kernels.norm import fused_rms_norm

            return fused_rms_norm(x, self.weight, self.eps)
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor | QuantisedRows, Tensor]:
        """(normalised x + residual, x + residual), both new tensors."""
        if self.fused and self.fp8 is not None:
            return self._quantised(x, residual)
        if self.fused:
            from engine.kernels.norm import fused_add_rms_norm

            return fused_add_rms_norm(x, residual, self.weight, self.eps)
        return add_rms_norm(x, residual, self.weight, self.eps)

    def _quantised(self, x: Tensor, residual: Tensor | None) -> tuple[QuantisedRows, Tensor]:
        from engine.kernels.fp8_quantise import fused_norm_quantise

        assert self.fp8 is not None
        values, scale, total = fused_norm_quantise(
            x, residual, self.weight, self.eps, self.fp8.group
        )
        return QuantisedRows(values, scale, x.dtype), total

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """The one slice `prefix`weight."""
        yield whole(f"{prefix}weight", self.weight)
