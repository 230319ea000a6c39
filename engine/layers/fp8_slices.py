"""What a quantised matrix takes from a checkpoint, in each of the forms that are published."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from engine.layers.fp8_config import Fp8Config
from engine.layers.weights import (
    Fp8Slice,
    QuantisedSlice,
    ScaleSlice,
    SpreadScaleSlice,
    WeightSlice,
    no_target,
)


@dataclass(frozen=True, slots=True)
class Fp8Part:
    """A checkpoint matrix inside a parameter: views of its values and scales, and its place."""

    target: Tensor
    scale: Tensor
    full_shape: tuple[int, int]
    dim: int  # the dimension that is split
    start: int


def fp8_slices(config: Fp8Config, name: str, part: Fp8Part) -> Iterator[WeightSlice]:
    """Slices of the matrix `name` and of its scales."""
    place = (part.full_shape, part.dim, part.start)
    if not config.is_stored:
        yield QuantisedSlice(f"{name}.weight", part.target, *place, scale=part.scale)
        return
    yield Fp8Slice(f"{name}.weight", part.target, *place)
    scale_name = f"{name}.{config.scale_name}"
    if config.has_tensor_scales:
        yield SpreadScaleSlice(scale_name, part.scale, ())
    elif config.block is None:
        rows = part.full_shape[0]
        start = part.start if part.dim == 0 else 0
        yield ScaleSlice(scale_name, part.scale[:, None], (rows, 1), 0, start)
    else:
        shape = tuple(-(-n // size) for n, size in zip(part.full_shape, config.block, strict=True))
        start = part.start // config.block[part.dim]
        yield ScaleSlice(scale_name, part.scale, shape, part.dim, start)
    if config.has_input_scales:
        yield SpreadScaleSlice(f"{name}.input_scale", no_target(part.scale), ())
