"""Eight numeric faults as they happen in engines, each planted into one rank's runner.

A check, a reference or a comparison of a server that misses one of them proves nothing about it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from engine.attention.base import AttentionMetadata
from engine.layers.rope import cos_sin_table
from engine.worker.command import StepCommand
from engine.worker.runner import ModelRunner

Fault = Callable[[ModelRunner], None]
_Inputs = tuple[Tensor, Tensor, object, AttentionMetadata]
_SUMMED_AT_ONCE = 16


def scale_off(runner: ModelRunner) -> None:
    """The scale of all attention scores is 1 % too large."""
    for attention in _attentions(runner):
        attention.scale *= 1.01


@torch.no_grad()
def rope_base(runner: ModelRunner) -> None:
    """The rotary base is that of another model: 1.1 times as large."""
    model = runner.model
    config = dataclasses.replace(model.config.rope, theta=model.config.rope.theta * 1.1)
    size = model.cos_sin.shape[0]
    model.cos_sin.copy_(cos_sin_table(config, model.config.head_dim, size, model.cos_sin.device))


def norm_eps(runner: ModelRunner) -> None:
    """The epsilon of every norm of the residual stream is ten times too large."""
    model: Any = runner.model
    norms = [norm for layer in model.layers for norm in (layer.input_norm, layer.post_norm)]
    for norm in (*norms, model.norm):
        norm.eps *= 10


@torch.no_grad()
def swapped_kv_head(runner: ModelRunner) -> None:
    """In the last layer two heads' keys and values have changed places."""
    attention = _attentions(runner)[-1]
    dim = runner.model.config.head_dim
    for bank in (0, 1):
        first = (attention.num_heads + bank * attention.num_kv_heads) * dim
        one, two = slice(first, first + dim), slice(first + dim, first + 2 * dim)
        for rows in (attention.qkv.weight, attention.qkv.bias):
            if rows is not None:
                kept = rows[one].clone()
                rows[one] = rows[two]
                rows[two] = kept


def chunk_position(runner: ModelRunner) -> None:
    """Chunks behind the first one are rotated for the position after theirs."""

    def shift(_model: object, inputs: _Inputs) -> _Inputs:
        ids, positions, caches, meta = inputs
        if meta.cu_seqlens_q is None:
            return inputs
        moved = positions.clone()
        bounds = (meta.cu_seqlens_q + meta.num_decodes).tolist()
        for start, stop in pairwise(bounds):
            if start < stop and int(positions[start]) > 0:
                moved[start:stop] += 1
        return ids, moved, caches, meta

    runner.model.register_forward_pre_hook(shift)


def bf16_sums(runner: ModelRunner) -> None:
    """The output projections of all attention blocks add up in bfloat16."""
    for attention in _attentions(runner):

        def summed(block: Any, inputs: tuple[Tensor], _output: Tensor) -> Tensor:  # noqa: ANN401
            x, weight = inputs[0], block.weight
            total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
            for start in range(0, x.shape[1], _SUMMED_AT_ONCE):
                part = slice(start, start + _SUMMED_AT_ONCE)
                total += (x[:, part] @ weight[:, part].T).to(torch.bfloat16)
            out = total.to(x.dtype)
            return out if block.bias is None else out + block.bias

        attention.out.register_forward_hook(summed)


def stale_prefix(runner: ModelRunner) -> None:
    """The first block that a request takes from the prefix cache holds other keys and values."""
    launch = runner.launch
    ends: dict[int, int] = {}  # slot -> where its last chunk ended

    def launch_with_stale_blocks(command: StepCommand) -> None:
        for chunk in command.chunks:
            if chunk.first_position not in (0, ends.get(chunk.slot)):
                first = _first_block(runner, command, chunk.slot)
                # Another block may well hold the same tokens, and pairs of keys and values may
                # stand in any order: so the values alone change their places.
                for cache in runner.kv_caches:
                    cache[1, first] = cache[1, first].flip(0)
            ends[chunk.slot] = chunk.first_position + len(chunk.token_ids)
        launch(command)

    runner.launch = launch_with_stale_blocks  # type: ignore[method-assign]


def _first_block(runner: ModelRunner, command: StepCommand, slot: int) -> int:
    place = slot * runner.state.width
    if place in command.table_index:
        return command.table_blocks[command.table_index.index(place)]
    return int(runner.state.block_tables[slot, 0])


@torch.no_grad()
def exchanged_shard(runner: ModelRunner) -> None:
    """What two ranks that took each other's part of the first gate and up projection compute."""
    model: Any = runner.model
    gate_up = getattr(model.layers[0].mlp, "gate_up", None)
    if gate_up is None:  # a mixture: two experts have changed places
        down = model.layers[0].mlp.experts.down
        down[[0, 1]] = down[[1, 0]]
        return
    for rows in (gate_up.weight, gate_up.bias):
        if rows is not None:
            quarters = rows.chunk(4)
            rows.copy_(torch.cat([quarters[1], quarters[0], quarters[3], quarters[2]]))


def _attentions(runner: ModelRunner) -> list[Any]:
    model: Any = runner.model
    return [layer.attention for layer in model.layers]


FAULTS: dict[str, Fault] = {
    "a scale off by 1 %": scale_off,
    "rotary base wrong": rope_base,
    "a norm's epsilon": norm_eps,
    "one head's KV swapped": swapped_kv_head,
    "last chunk's position off by one": chunk_position,
    "bf16 accumulation": bf16_sums,
    "a stale prefix block": stale_prefix,
    "a rank's shard exchanged": exchanged_shard,
}
