"""What a parameter takes from a checkpoint: the contract between layers and the loader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


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


class HasWeights(Protocol):
    """A model as the loader sees it."""

    def weight_slices(self) -> Iterator[WeightSlice]:
        """Every slice of every parameter, each exactly once."""
        ...

    def ignored_weights(self) -> frozenset[str]:
        """Names that a checkpoint may hold although no parameter takes them."""
        ...


def whole(name: str, target: Tensor) -> WeightSlice:
    """The slice of a parameter that every rank keeps in full."""
    return WeightSlice(name, target, tuple(target.shape))
