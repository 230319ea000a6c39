"""RMSNorm, alone and fused with the residual addition; inputs are never written to."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

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
    """Root mean square normalisation with an optional fused residual addition."""

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, device: torch.device, fused: bool
    ) -> None:
        super().__init__()
        self.eps = eps
        self.fused = fused
        self.weight = new_parameter((size,), dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        """The normalised x, in a new tensor."""
        if self.fused:
            from engine.kernels.norm import fused_rms_norm

            return fused_rms_norm(x, self.weight, self.eps)
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normalised x + residual, x + residual), both new tensors."""
        if self.fused:
            from engine.kernels.norm import fused_add_rms_norm

            return fused_add_rms_norm(x, residual, self.weight, self.eps)
        return add_rms_norm(x, residual, self.weight, self.eps)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """The one slice `prefix`weight."""
        yield whole(f"{prefix}weight", self.weight)
