# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202 (Triton gives its own meaning to annotations)
"""Choosing experts, and putting the chosen (token, expert) pairs in the order of their experts.

Both work on the device alone: how many tokens an expert gets is never known to the host, so a CUDA
graph holds whatever the router says at replay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.dependents import early_launch
from engine.kernels.sizes import cdiv, next_power_of_2

_LARGEST_CHUNK = 4096


@triton.jit
def _top_k_kernel(
    scores_ptr,
    weights_ptr,
    experts_ptr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    slot = tl.arange(0, BLOCK_K)
    live = expert < NUM_EXPERTS
    score = tl.load(scores_ptr + row * NUM_EXPERTS + expert, mask=live, other=float("-inf"))
    score = score.to(tl.float32)
    probability = tl.exp(score - tl.max(score, axis=0))
    probability = probability / tl.sum(probability, axis=0)
    left = tl.where(live, probability, -1.0)
    weights = tl.zeros([BLOCK_K], tl.float32)
    experts = tl.zeros([BLOCK_K], tl.int32)
    for k in tl.static_range(TOP_K):
        # Of equal ones the leftmost, as in the reference.
        best, index = tl.max(left, axis=0, return_indices=True, return_indices_tie_break_left=True)
        weights = tl.where(slot == k, best, weights)
        experts = tl.where(slot == k, index, experts)
        left = tl.where(expert == index, -1.0, left)
    if RENORMALISED:
        weights = weights / tl.sum(weights, axis=0)
    tl.store(weights_ptr + row * TOP_K + slot, weights, mask=slot < TOP_K)
    tl.store(experts_ptr + row * TOP_K + slot, experts, mask=slot < TOP_K)


def fused_top_k(scores: Tensor, top_k: int, renormalised: bool) -> tuple[Tensor, Tensor]:
    """See engine.layers.router.route, from its scores [T, E] on."""
    num_tokens, num_experts = scores.shape
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=scores.device)
    experts = torch.empty((num_tokens, top_k), dtype=torch.int32, device=scores.device)
    if num_tokens:
        _top_k_kernel[(num_tokens,)](
            scores.contiguous(),
            weights,
            experts,
            NUM_EXPERTS=num_experts,
            TOP_K=top_k,
            RENORMALISED=renormalised,
            BLOCK_E=next_power_of_2(num_experts),
            BLOCK_K=next_power_of_2(top_k),
            num_warps=1 if num_experts <= 256 else 4,
            **early_launch(scores.device),
        )
    return weights, experts


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """Pairs (token, chosen expert) sorted by expert, cut into tiles of at most `block_m` pairs.

    A tile holds pairs of one expert; tiles beyond the last have expert -1.
    """

    pairs: Tensor  # int32 [T * top_k]; pair p is slot p % top_k of token p // top_k
    tile_expert: Tensor  # int32 [most tiles]
    tile_first: Tensor  # int32 [most tiles]: place of the tile's first pair in `pairs`
    expert_end: Tensor  # int32 [experts]: place behind the expert's last pair
    block_m: int

    @property
    def most_tiles(self) -> int:
        """Tiles that no choice of experts can exceed."""
        return self.tile_expert.numel()


@triton.jit
def _order_kernel(
    experts_ptr,
    pairs_ptr,
    tile_expert_ptr,
    tile_first_ptr,
    end_ptr,
    num_pairs,
    first_expert,
    most_tiles,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program gathers the pairs of one expert, in ascending order."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    mine = tl.program_id(0)
    bins = tl.arange(0, BLOCK_E)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        expert = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1) - first_expert
        here = (pair < num_pairs) & (expert >= 0) & (expert < NUM_EXPERTS)
        counts += tl.histogram(tl.where(here, expert, 0), BLOCK_E, mask=here)
    tiles = tl.cdiv(counts, BLOCK_M)
    count = tl.sum(tl.where(bins == mine, counts, 0), axis=0)
    first = tl.sum(tl.where(bins < mine, counts, 0), axis=0)
    first_tile = tl.sum(tl.where(bins < mine, tiles, 0), axis=0)
    tl.store(end_ptr + mine, first + count)
    for number in range(0, tl.cdiv(count, BLOCK_M)):
        tl.store(tile_expert_ptr + first_tile + number, mine)
        tl.store(tile_first_ptr + first_tile + number, first + number * BLOCK_M)
    if mine == NUM_EXPERTS - 1:
        for tile in range(tl.sum(tiles, axis=0), most_tiles):
            tl.store(tile_expert_ptr + tile, -1)
    if count > 0:
        place = first
        for start in range(0, num_pairs, CHUNK):
            pair = start + tl.arange(0, CHUNK)
            expert = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1) - first_expert
            here = ((pair < num_pairs) & (expert == mine)).to(tl.int32)
            rank = tl.cumsum(here, axis=0) - here
            tl.store(pairs_ptr + place + rank, pair, mask=here != 0)
            place += tl.sum(here, axis=0)


def order_by_expert(
    experts: Tensor, first_expert: int, num_experts: int, block_m: int
) -> ExpertOrder:
    """The order of the pairs of `experts` [T, top_k] that go to this rank's experts."""
    num_pairs, device = experts.numel(), experts.device
    most_tiles = min(num_pairs, num_experts + num_pairs // block_m)
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=device)
    tile_expert, tile_first = (
        torch.empty(most_tiles, dtype=torch.int32, device=device) for _ in range(2)
    )
    expert_end = torch.empty(num_experts, dtype=torch.int32, device=device)
    if num_pairs:
        _order_kernel[(num_experts,)](
            experts,
            pairs,
            tile_expert,
            tile_first,
            expert_end,
            num_pairs,
            first_expert,
            most_tiles,
            NUM_EXPERTS=num_experts,
            BLOCK_E=next_power_of_2(max(2, num_experts)),
            BLOCK_M=block_m,
            CHUNK=min(_LARGEST_CHUNK, max(128, next_power_of_2(num_pairs))),
            num_warps=4,
            **early_launch(device),
        )
    return ExpertOrder(pairs, tile_expert, tile_first, expert_end, block_m)


@triton.jit
def _sum_kernel(
    shares_ptr,
    experts_ptr,
    out_ptr,
    first_expert,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        expert = tl.load(experts_ptr + row * TOP_K + k) - first_expert
        # Nobody wrote the shares of experts that other ranks hold.
        size = tl.where((expert >= 0) & (expert < NUM_EXPERTS), SIZE, 0)
        at = (row * TOP_K + k) * SIZE + column
        total += tl.load(shares_ptr + at, mask=column < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, total.to(out_ptr.dtype.element_ty), mask=mask)


def sum_shares(shares: Tensor, experts: Tensor, first_expert: int, num_experts: int) -> Tensor:
    """Sum over the slots of `shares` [T * top_k, H] whose experts this rank holds, [T, H]."""
    num_tokens, top_k = experts.shape
    size = shares.shape[1]
    out = torch.empty((num_tokens, size), dtype=shares.dtype, device=shares.device)
    block = min(1024, next_power_of_2(size))
    if num_tokens:
        _sum_kernel[(num_tokens, cdiv(size, block))](
            shares,
            experts,
            out,
            first_expert,
            SIZE=size,
            TOP_K=top_k,
            NUM_EXPERTS=num_experts,
            BLOCK=block,
            num_warps=4,
            **early_launch(shares.device),
        )
    return out
