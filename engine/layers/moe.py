"""Mixtures of experts: a router, and feed-forward experts of which each token visits a few."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.distributed.group import TpGroup
from engine.layers.fp8 import FP8, Fp8Matrix
from engine.layers.fp8_config import Fp8Config, check_blocks
from engine.layers.fp8_slices import Fp8Part, fp8_slices
from engine.layers.linear import new_parameter, scale_shape
from engine.layers.mlp import SwiGLU, silu_mul
from engine.layers.moe_config import MoeConfig
from engine.layers.router import float32_scores, route
from engine.layers.sharding import Shard, even_shard
from engine.layers.weights import WeightSlice, whole


def experts_reference(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor | Sequence[Fp8Matrix],
    down: Tensor | Sequence[Fp8Matrix],
    first_expert: int,
) -> Tensor:
    """Weighted sum of the chosen experts' outputs [T, H], as far as this rank holds them.

    `gate_up` is [E, 2 I, H] and `down` [E, H, I], from expert `first_expert` on, or quantised
    matrices of those shapes.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for number, (wide, narrow) in enumerate(zip(gate_up, down, strict=True)):
        rows, slots = (experts == first_expert + number).nonzero(as_tuple=True)
        if rows.numel() == 0:
            continue
        hidden = silu_mul(_product(x[rows], wide))
        share = _product(hidden, narrow).float() * weights[rows, slots, None]
        out.index_add_(0, rows, share)
    return out.to(x.dtype)


def _product(x: Tensor, matrix: Tensor | Fp8Matrix) -> Tensor:
    if isinstance(matrix, Fp8Matrix):
        return matrix.product(x)
    return functional.linear(x, matrix)


class Experts(nn.Module):
    """This rank's experts, or its columns of all of them; stacked by expert."""

    def __init__(
        self,
        hidden_size: int,
        moe: MoeConfig,
        group: TpGroup,
        dtype: torch.dtype,
        device: torch.device,
        fused: bool,
        expert_parallel: bool,
        fp8: Fp8Config | None = None,
    ) -> None:
        super().__init__()
        self.moe, self.fused, self.fp8 = moe, fused, fp8
        everything = Shard(moe.num_experts, 0, moe.num_experts)
        columns = Shard(moe.intermediate_size, 0, moe.intermediate_size)
        if expert_parallel:
            self.experts = even_shard(moe.num_experts, group.rank, group.size)
            self.columns = columns
        else:
            self.experts = everything
            self.columns = even_shard(moe.intermediate_size, group.rank, group.size)
        count, width = self.experts.size, self.columns.size
        stored = dtype if fp8 is None else FP8
        self.gate_up = new_parameter((count, 2 * width, hidden_size), stored, device)
        self.down = new_parameter((count, hidden_size, width), stored, device)
        self.gate_up_scale: nn.Parameter | None = None
        self.down_scale: nn.Parameter | None = None
        if fp8 is not None:
            check_blocks(fp8, "an expert", self.columns, Shard(hidden_size, 0, hidden_size))
            check_blocks(fp8, "an expert", Shard(hidden_size, 0, hidden_size), self.columns)
            shapes = (
                scale_shape(fp8, 2 * width, hidden_size),
                scale_shape(fp8, hidden_size, width),
            )
            self.gate_up_scale = new_parameter((count, *shapes[0]), torch.float32, device)
            self.down_scale = new_parameter((count, *shapes[1]), torch.float32, device)
        self._matrices: tuple[list[Fp8Matrix], list[Fp8Matrix]] | None = None

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """This rank's share of the weighted sum [T, H]."""
        first = self.experts.start
        if not self.fused:
            if self.fp8 is None:
                return experts_reference(x, weights, chosen, self.gate_up, self.down, first)
            return experts_reference(x, weights, chosen, *self._quantised_matrices(), first)
        from engine.kernels.moe_products import block_m_for, grouped_product
        from engine.kernels.moe_route import order_by_expert, sum_shares

        top_k, count = chosen.shape[1], self.experts.size
        order = order_by_expert(chosen, first, count, block_m_for(chosen.numel(), count))
        if self.fp8 is None:
            rows = grouped_product(x, self.gate_up, order, top_k, None, x.dtype)
            shares = grouped_product(rows, self.down, order, top_k, weights, x.dtype)
            return sum_shares(shares, chosen, first, count)
        from engine.kernels.fp8_quantise import fused_quantise_rows

        block, group = self.fp8.block, self.fp8.group
        a, a_scale = fused_quantise_rows(x, group)
        rows = grouped_product(
            a, self.gate_up, order, top_k, None, x.dtype, a_scale, self.gate_up_scale, block
        )
        a, a_scale = fused_quantise_rows(rows, group)
        shares = grouped_product(
            a, self.down, order, top_k, weights, x.dtype, a_scale, self.down_scale, block
        )
        return sum_shares(shares, chosen, first, count)

    def _quantised_matrices(self) -> tuple[list[Fp8Matrix], list[Fp8Matrix]]:
        if self._matrices is None:
            assert self.fp8 is not None and self.gate_up_scale is not None
            assert self.down_scale is not None
            block = self.fp8.block
            wide, narrow = (
                [Fp8Matrix(w, s, block, False) for w, s in zip(weight, scale, strict=True)]
                for weight, scale in (
                    (self.gate_up, self.gate_up_scale),
                    (self.down, self.down_scale),
                )
            )
            self._matrices = (wide, narrow)
        return self._matrices

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Slices of every expert's three projections; those of other ranks' experts are empty."""
        hidden_size, width = self.down.shape[1], self.columns.size
        gate, up, down = self.moe.family.parts
        wide, narrow = (self.columns.full, hidden_size), (hidden_size, self.columns.full)
        half = None if self.gate_up_scale is None else self.gate_up_scale.shape[1] // 2
        for expert in range(self.experts.full):
            mine = expert - self.experts.start
            held = 0 <= mine < self.experts.size
            # A slice without rows stands for an expert that another rank holds.
            at, kept = (mine, slice(None)) if held else (0, slice(0, 0))
            rows = self.gate_up[at]
            scales = None if self.gate_up_scale is None else self.gate_up_scale[at]
            start = self.columns.start if held else 0
            for name, part, scale in (
                (gate, rows[:width], None if scales is None else scales[:half]),
                (up, rows[width:], None if scales is None else scales[half:]),
            ):
                scale = None if scale is None else scale[kept]
                yield from self._slices(
                    f"{prefix}{expert}.{name}", part[kept], scale, wide, 0, start
                )
            scale = None if self.down_scale is None else self.down_scale[at]
            target = self.down[at]
            if not held:
                target = target[:, :0]
                scale = None if scale is None else scale[..., :0]
            yield from self._slices(f"{prefix}{expert}.{down}", target, scale, narrow, 1, start)

    def _slices(
        self,
        name: str,
        target: Tensor,
        scale: Tensor | None,
        shape: tuple[int, int],
        dim: int,
        start: int,
    ) -> Iterator[WeightSlice]:
        if self.fp8 is None:
            yield WeightSlice(f"{name}.weight", target, shape, dim, start)
            return
        assert scale is not None
        yield from fp8_slices(self.fp8, name, Fp8Part(target, scale, shape, dim, start))


class SparseMoe(nn.Module):
    """The feed-forward block of a sparse layer."""

    def __init__(
        self,
        hidden_size: int,
        moe: MoeConfig,
        group: TpGroup,
        dtype: torch.dtype,
        device: torch.device,
        fused: bool,
        expert_parallel: bool,
        fp8: Fp8Config | None = None,
        shared_fp8: Fp8Config | None = None,
    ) -> None:
        super().__init__()
        self.moe, self.group, self.fused = moe, group, fused
        self.router = new_parameter((moe.num_experts, hidden_size), dtype, device)
        self.experts = Experts(hidden_size, moe, group, dtype, device, fused, expert_parallel, fp8)
        self.shared: SwiGLU | None = None
        if moe.shared_intermediate_size:
            self.shared = SwiGLU(
                hidden_size,
                moe.shared_intermediate_size,
                False,
                group,
                dtype,
                device,
                fused,
                shared_fp8,
            )
            self.shared_gate = new_parameter((1, hidden_size), dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output [T, H], equal on every rank."""
        weights, chosen = self.choose(x)
        out = self.group.all_reduce(self.experts(x, weights, chosen))
        if self.shared is None:
            return out
        gate = torch.sigmoid(functional.linear(x, self.shared_gate))
        return out + gate * self.shared(x)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts of each token: see `route`."""
        top_k, renormalised = self.moe.num_experts_per_tok, self.moe.renormalised
        if self.fused:
            from engine.kernels.moe_route import fused_top_k

            return fused_top_k(float32_scores(x, self.router), top_k, renormalised)
        return route(x, self.router, top_k, renormalised)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Slices of the router, the experts and what every token sees."""
        yield whole(f"{prefix}gate.weight", self.router)
        yield from self.experts.weight_slices(f"{prefix}experts.")
        if self.shared is not None:
            yield from self.shared.weight_slices(f"{prefix}shared_expert.")
            yield whole(f"{prefix}shared_expert_gate.weight", self.shared_gate)
