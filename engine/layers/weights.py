"""What a parameter takes from a checkpoint: the contract between layers and the loader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """One tensor of the checkpoint and the part of it that this rank keeps.

    `target` is a view into a parameter; it takes `target.shape[dim]` rows of dimension `dim` from
    `start` on. It may be empty (a shard that is all padding), but the tensor must still exist.
    """

    name: str
    target: Tensor
    full_shape: tuple[int, ...]
    dim: int = 0
    start: int = 0

    @property
    def stop(self) -> int:
        """End of the kept rows in dimension `dim`."""
        return self.start + self.target.shape[self.dim]

    @property
    def is_scale(self) -> bool:
        """Whether the values must be positive and finite."""
        return False

    @property
    def wanted(self) -> str:
        """The dtype that is expected, in words."""
        return "floating point"

    def takes_shape(self, shape: tuple[int, ...]) -> bool:
        """Whether a stored tensor of this shape fits."""
        return shape == self.full_shape

    def takes_dtype(self, dtype: str) -> bool:
        """Whether a stored tensor of this dtype, in the words of safetensors, fits."""
        return dtype in _FLOATS

    def put(self, part: Tensor) -> None:
        """Fill the target with the kept part of the stored tensor."""
        self.target.copy_(part)


class Fp8Slice(WeightSlice):
    """A matrix that is stored in 8-bit floats."""

    @property
    def wanted(self) -> str:
        """The one dtype that fits."""
        return "F8_E4M3"

    def takes_dtype(self, dtype: str) -> bool:
        """Only e4m3."""
        return dtype == "F8_E4M3"


class ScaleSlice(WeightSlice):
    """Scales of a quantised matrix; the target is float32."""

    @property
    def is_scale(self) -> bool:
        """They are."""
        return True


class SpreadScaleSlice(ScaleSlice):
    """One scale of a whole tensor; it fills the target, which may also take nothing of it."""

    def takes_shape(self, shape: tuple[int, ...]) -> bool:
        """One number, in any form."""
        return shape in ((), (1,), (1, 1))

    def put(self, part: Tensor) -> None:
        """The same scale everywhere."""
        self.target.fill_(part.float().reshape(()).item())


@dataclass(frozen=True, slots=True)
class QuantisedSlice(WeightSlice):
    """A 16-bit matrix that is quantised while loading, each row of this rank's part on its own."""

    scale: Tensor | None = None  # float32, a view of the same rows

    def put(self, part: Tensor) -> None:
        """Quantise, where the target is."""
        from engine.layers.fp8 import quantise_rows

        assert self.scale is not None
        rows = quantise_rows(part.to(self.target.device))
        self.target.copy_(rows.values)
        self.scale.copy_(rows.scale[:, 0])


class HasWeights(Protocol):
    """A model as the loader sees it."""

    def weight_slices(self) -> Iterator[WeightSlice]:
        """Every slice of every parameter, each exactly once."""
        ...

    def ignored_weights(self) -> frozenset[str]:
        """Names that a checkpoint may hold although no parameter takes them."""
        ...


def kv_scale_names(layer: int) -> tuple[str, ...]:
    """Names under which checkpoints hold the scales of a layer's keys, then of its values."""
    prefix = f"model.layers.{layer}.self_attn."
    return tuple(
        f"{prefix}{name}" for name in ("k_scale", "k_proj.k_scale", "v_scale", "v_proj.v_scale")
    )


def whole(name: str, target: Tensor) -> WeightSlice:
    """The slice of a parameter that every rank keeps in full."""
    return WeightSlice(name, target, tuple(target.shape))


def no_target(like: Tensor) -> Tensor:
    """A target that takes nothing."""
    return torch.empty(0, dtype=like.dtype, device=like.device)
