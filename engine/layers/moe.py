"""Mixtures of experts: a router, and feed-forward experts of which each token visits a few."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.distributed.group import TpGroup
from engine.layers.linear import new_parameter
from engine.layers.mlp import SwiGLU, silu_mul
from engine.layers.moe_config import MoeConfig
from engine.layers.router import float32_scores, route
from engine.layers.sharding import Shard, even_shard
from engine.layers.weights import WeightSlice, whole


def experts_reference(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, first_expert: int
) -> Tensor:
    """Weighted sum of the chosen experts' outputs [T, H], as far as this rank holds them.

    `gate_up` is [E, 2 I, H] and `down` [E, H, I], from expert `first_expert` on.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for number, (wide, narrow) in enumerate(zip(gate_up, down, strict=True)):
        rows, slots = (experts == first_expert + number).nonzero(as_tuple=True)
        if rows.numel() == 0:
            continue
        hidden = silu_mul(functional.linear(x[rows], wide))
        share = functional.linear(hidden, narrow).float() * weights[rows, slots, None]
        out.index_add_(0, rows, share)
    return out.to(x.dtype)


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
    ) -> None:
        super().__init__()
        self.moe, self.fused = moe, fused
        everything = Shard(moe.num_experts, 0, moe.num_experts)
        columns = Shard(moe.intermediate_size, 0, moe.intermediate_size)
        if expert_parallel:
            self.experts = even_shard(moe.num_experts, group.rank, group.size)
            self.columns = columns
        else:
            self.experts = everything
            self.columns = even_shard(moe.intermediate_size, group.rank, group.size)
        count, width = self.experts.size, self.columns.size
        self.gate_up = new_parameter((count, 2 * width, hidden_size), dtype, device)
        self.down = new_parameter((count, hidden_size, width), dtype, device)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """This rank's share of the weighted sum [T, H]."""
        first = self.experts.start
        if not self.fused:
            return experts_reference(x, weights, chosen, self.gate_up, self.down, first)
        from engine.kernels.moe_products import block_m_for, grouped_product
        from engine.kernels.moe_route import order_by_expert, sum_shares

        top_k, count = chosen.shape[1], self.experts.size
        order = order_by_expert(chosen, first, count, block_m_for(chosen.numel(), count))
        rows = grouped_product(x, self.gate_up, order, top_k, None, x.dtype)
        shares = grouped_product(rows, self.down, order, top_k, weights, x.dtype)
        return sum_shares(shares, chosen, first, count)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Slices of every expert's three projections; those of other ranks' experts are empty."""
        hidden_size, width = self.down.shape[1], self.columns.size
        gate, up, down = self.moe.family.parts
        wide, narrow = (self.columns.full, hidden_size), (hidden_size, self.columns.full)
        for expert in range(self.experts.full):
            mine = expert - self.experts.start
            name = f"{prefix}{expert}."
            if 0 <= mine < self.experts.size:
                rows = self.gate_up[mine]
                start = self.columns.start
                yield WeightSlice(f"{name}{gate}.weight", rows[:width], wide, start=start)
                yield WeightSlice(f"{name}{up}.weight", rows[width:], wide, start=start)
                target = self.down[mine]
                yield WeightSlice(f"{name}{down}.weight", target, narrow, dim=1, start=start)
                continue
            for part in (gate, up):
                nothing = self.gate_up.new_empty((0, hidden_size))
                yield WeightSlice(f"{name}{part}.weight", nothing, wide)
            nothing = self.down.new_empty((hidden_size, 0))
            yield WeightSlice(f"{name}{down}.weight", nothing, narrow, dim=1)


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
    ) -> None:
        super().__init__()
        self.moe, self.group, self.fused = moe, group, fused
        self.router = new_parameter((moe.num_experts, hidden_size), dtype, device)
        self.experts = Experts(hidden_size, moe, group, dtype, device, fused, expert_parallel)
        self.shared: SwiGLU | None = None
        if moe.shared_intermediate_size:
            self.shared = SwiGLU(
                hidden_size, moe.shared_intermediate_size, False, group, dtype, device, fused
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
