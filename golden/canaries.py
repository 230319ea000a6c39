"""Planted defects: each must be caught by a rule, or the rules prove nothing."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from engine.attention.base import AttentionMetadata
from engine.layers.rope import cos_sin_table
from golden.forced import ForcedRunner
from golden.models import Defect


@torch.no_grad()
def perturb_weight(runner: ForcedRunner) -> None:
    """One single element of one output projection is wrong by four standard deviations."""
    weight = runner.model.get_parameter("layers.1.attention.out.weight")
    weight[0, 0] += 4 * float(weight.float().std())


@torch.no_grad()
def scale_row(runner: ForcedRunner) -> None:
    """One output row of one feed-forward block is half too large."""
    weight = runner.model.get_parameter("layers.0.mlp.down.weight")
    weight[3] *= 1.5


def shift_decode_positions(runner: ForcedRunner) -> None:
    """Decoded tokens are rotated for the position after theirs.

    A shift of all positions alike is invisible, because rotations are relative.
    """

    def shift(
        _model: object, inputs: tuple[Tensor, Tensor, object, AttentionMetadata]
    ) -> tuple[Tensor, Tensor, object, AttentionMetadata]:
        ids, positions, caches, meta = inputs
        moved = positions.clone()
        moved[: meta.num_decodes] += 1
        return ids, moved, caches, meta

    runner.model.register_forward_pre_hook(shift)


@torch.no_grad()
def stretch_rope(runner: ForcedRunner) -> None:
    """The rotary base is 1 % too large."""
    model = runner.model
    config = dataclasses.replace(model.config.rope, theta=model.config.rope.theta * 1.01)
    table = cos_sin_table(
        config, model.config.head_dim, model.cos_sin.shape[0], model.cos_sin.device
    )
    model.cos_sin.copy_(table)


@torch.no_grad()
def swap_experts(runner: ForcedRunner) -> None:
    """Two experts of one layer have changed places, but not in the router."""
    down = runner.model.get_parameter("layers.1.mlp.experts.down")
    down[[0, 1]] = down[[1, 0]]


@torch.no_grad()
def tilt_router(runner: ForcedRunner) -> None:
    """One expert's scores are 10 % too large."""
    runner.model.get_parameter("layers.1.mlp.router")[2] *= 1.1


SPARSE_CANARIES: dict[str, Defect] = {
    "swapped experts": swap_experts,
    "tilted router": tilt_router,
}
CANARIES: dict[str, Defect] = {
    "perturbed weight": perturb_weight,
    "scaled row": scale_row,
    "off-by-one position": shift_decode_positions,
    "rope theta +1 %": stretch_rope,
}
