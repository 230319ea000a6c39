"""Linear layers split over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.distributed.group import TpGroup
from engine.layers.sharding import Shard, even_shard, kv_head_shard
from engine.layers.weights import WeightSlice, whole


def new_parameter(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter for inference; its content is undefined until loaded."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


@dataclass(frozen=True, slots=True)
class ColumnPart:
    """One checkpoint matrix inside a fused column-parallel layer: its name and its rows here."""

    name: str
    rows: Shard


class ColumnParallelLinear(nn.Module):
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
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.in_features = in_features
        self.out_sizes = tuple(part.rows.size for part in parts)
        self.weight = new_parameter((sum(self.out_sizes), in_features), dtype, device)
        self.bias = new_parameter((sum(self.out_sizes),), dtype, device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """This rank's output columns."""
        return functional.linear(x, self.weight, self.bias)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Slices named `prefix` + part name + `.weight` / `.bias`."""
        offset = 0
        for part in self.parts:
            end = offset + part.rows.size
            shape = (part.rows.full, self.in_features)
            name = f"{prefix}{part.name}"
            yield WeightSlice(
                f"{name}.weight", self.weight[offset:end], shape, start=part.rows.start
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


class RowParallelLinear(nn.Module):
    """x @ W.T where the columns of W (the inputs) are split; the ranks' outputs are summed."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        group: TpGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.group = group
        self.columns = even_shard(in_features, group.rank, group.size)
        self.weight = new_parameter((out_features, self.columns.size), dtype, device)
        self.bias = new_parameter((out_features,), dtype, device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """The full output, equal on every rank."""
        if self.group.size == 1:
            return functional.linear(x, self.weight, self.bias)
        out = self.group.all_reduce(functional.linear(x, self.weight))
        # Every rank holds the whole bias and adds it after the sum, so it counts once.
        return out if self.bias is None else out + self.bias

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Slices of `prefix`weight (split along its inputs) and `prefix`bias (whole)."""
        shape = (self.weight.shape[0], self.columns.full)
        yield WeightSlice(f"{prefix}weight", self.weight, shape, dim=1, start=self.columns.start)
        if self.bias is not None:
            yield whole(f"{prefix}bias", self.bias)
