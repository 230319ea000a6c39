"""Linear layers split over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.distributed.group import TpGroup
from engine.layers.fp8 import FP8, Fp8Matrix, QuantisedRows
from engine.layers.fp8_config import Fp8Config, check_blocks
from engine.layers.fp8_slices import Fp8Part, fp8_slices
from engine.layers.sharding import Shard, even_shard, kv_head_shard
from engine.layers.weights import WeightSlice, whole


def new_parameter(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter for inference; its content is undefined until loaded."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class Matrix(nn.Module):
    """A weight matrix [rows, columns], in the model's dtype or in 8-bit floats with scales."""

    def __init__(
        self,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
        fp8: Fp8Config | None,
        fused: bool,
    ) -> None:
        super().__init__()
        self.fp8 = fp8
        self.weight = new_parameter((rows, columns), dtype if fp8 is None else FP8, device)
        self.weight_scale: nn.Parameter | None = None
        self.matrix: Fp8Matrix | None = None
        if fp8 is not None:
            shape = scale_shape(fp8, rows, columns)
            self.weight_scale = new_parameter(shape, torch.float32, device)
            self.matrix = Fp8Matrix(self.weight, self.weight_scale, fp8.block, fused)

    def product(self, x: Tensor | QuantisedRows, bias: Tensor | None = None) -> Tensor:
        """x @ W.T + bias."""
        if self.matrix is not None:
            return self.matrix.product(x, bias)
        assert isinstance(x, Tensor)
        return functional.linear(x, self.weight, bias)


def scale_shape(fp8: Fp8Config, rows: int, columns: int) -> tuple[int, ...]:
    """Shape of the scales of a matrix."""
    if fp8.block is None:
        return (rows,)
    return (-(-rows // fp8.block[0]), -(-columns // fp8.block[1]))


@dataclass(frozen=True, slots=True)
class ColumnPart:
    """One checkpoint matrix inside a fused column-parallel layer: its name and its rows here."""

    name: str
    rows: Shard


class ColumnParallelLinear(Matrix):
    """x @ W.T where the rows of W (the output columns) are split; several matrices may be fused.

    The output holds this rank's columns, part after part; nothing is communicated.
    """

    def __init__(
        self,
        in_features: int,
        parts: Sequence[ColumnPart],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        fp8: Fp8Config | None = None,
        fused: bool = False,
    ) -> None:
        for part in parts:
            check_blocks(fp8, part.name, part.rows, Shard(in_features, 0, in_features))
        rows = sum(part.rows.size for part in parts)
        super().__init__(rows, in_features, dtype, device, fp8, fused)
        self.parts = tuple(parts)
        self.in_features = in_features
        self.out_sizes = tuple(part.rows.size for part in parts)
        self.bias = new_parameter((rows,), dtype, device) if bias else None

    def forward(self, x: Tensor | QuantisedRows) -> Tensor:
        """This rank's output columns."""
        return self.product(x, self.bias)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Slices named `prefix` + part name + `.weight` / `.bias`."""
        offset = 0
        for part in self.parts:
            end = offset + part.rows.size
            shape = (part.rows.full, self.in_features)
            name = f"{prefix}{part.name}"
            target = self.weight[offset:end]
            if self.fp8 is None:
                yield WeightSlice(f"{name}.weight", target, shape, start=part.rows.start)
            else:
                assert self.weight_scale is not None
                step = 1 if self.fp8.block is None else self.fp8.block[0]
                scale = self.weight_scale[offset // step : end // step]
                yield from fp8_slices(
                    self.fp8, name, Fp8Part(target, scale, shape, 0, part.rows.start)
                )
            if self.bias is not None:
                yield WeightSlice(
                    f"{name}.bias", self.bias[offset:end], shape[:1], start=part.rows.start
                )
            offset = end


def merged_parts(names: Sequence[str], rows: int, group: TpGroup) -> list[ColumnPart]:
    """Parts of equal size, each split evenly (gate and up projection)."""
    return [ColumnPart(name, even_shard(rows, group.rank, group.size)) for name in names]


def qkv_parts(num_heads: int, num_kv_heads: int, head_dim: int, group: TpGroup) -> list[ColumnPart]:
    """Query, key and value parts; KV heads are replicated where there are fewer than ranks."""
    q = even_shard(num_heads, group.rank, group.size)
    kv = kv_head_shard(num_kv_heads, group.rank, group.size)
    return [
        ColumnPart(name, Shard(s.full * head_dim, s.start * head_dim, s.size * head_dim))
        for name, s in (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    ]


class RowParallelLinear(Matrix):
    """x @ W.T where the columns of W (the inputs) are split; the ranks' outputs are summed."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        group: TpGroup,
        dtype: torch.dtype,
        device: torch.device,
        fp8: Fp8Config | None = None,
        fused: bool = False,
    ) -> None:
        columns = even_shard(in_features, group.rank, group.size)
        check_blocks(fp8, "an output projection", Shard(out_features, 0, out_features), columns)
        super().__init__(out_features, columns.size, dtype, device, fp8, fused)
        self.group = group
        self.columns = columns
        self.bias = new_parameter((out_features,), dtype, device) if bias else None

    def forward(self, x: Tensor | QuantisedRows) -> Tensor:
        """The full output, equal on every rank."""
        if self.group.size == 1:
            return self.product(x, self.bias)
        out = self.group.all_reduce(self.product(x))
        # Every rank holds the whole bias and adds it after the sum, so it counts once.
        return out if self.bias is None else out + self.bias

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Slices of `prefix`weight (split along its inputs) and `prefix`bias (whole)."""
        shape = (self.weight.shape[0], self.columns.full)
        start = self.columns.start
        if self.fp8 is None:
            yield WeightSlice(f"{prefix}weight", self.weight, shape, dim=1, start=start)
        else:
            assert self.weight_scale is not None
            part = Fp8Part(self.weight, self.weight_scale, shape, 1, start)
            yield from fp8_slices(self.fp8, prefix.removesuffix("."), part)
        if self.bias is not None:
            yield whole(f"{prefix}bias", self.bias)
