"""Tensor parallelism on paper-sized matrices: each rank's part, and how the parts add up."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.layers.sharding import even_shard, kv_head_shard, padded_vocab_rows, vocab_shard

RANKS = 2


def explain() -> Iterator[str]:
    """The experiment, line by line."""
    torch.manual_seed(0)
    yield f"Every layer is computed by {RANKS} ranks; a difference is to the layer in one piece."
    yield ""
    yield from _column()
    yield from _row()
    yield from _qkv()
    yield from _mlp()
    yield from _vocabulary()


def _difference(parts: Tensor, whole: Tensor) -> str:
    return f"largest difference {float((parts - whole).abs().max()):.1e}"


def _rows(weight: Tensor, rank: int, size: int = RANKS) -> Tensor:
    shard = even_shard(weight.shape[0], rank, size)
    return weight[shard.start : shard.start + shard.size]


def _columns(weight: Tensor, rank: int) -> Tensor:
    return _rows(weight.T, rank).T


def _column() -> Iterator[str]:
    x, weight = torch.randn(3, 8), torch.randn(6, 8)
    parts = [x @ _rows(weight, rank).T for rank in range(RANKS)]
    yield "Column parallel, y = x W^T: each rank keeps rows of W, so it gets columns of y."
    yield f"  W {list(weight.shape)} -> {[list(_rows(weight, r).shape) for r in range(RANKS)]}"
    yield f"  the columns side by side: {_difference(torch.cat(parts, -1), x @ weight.T)}"
    yield "  Nothing is sent: the next layer takes the columns as they are."
    yield ""


def _row() -> Iterator[str]:
    x, weight, bias = torch.randn(3, 8), torch.randn(6, 8), torch.randn(6)
    parts = [_columns(x, rank) @ _columns(weight, rank).T for rank in range(RANKS)]
    whole = x @ weight.T + bias
    yield "Row parallel: each rank keeps columns of W and the matching columns of x."
    yield f"  each part has the full shape {list(parts[0].shape)}; an all-reduce adds them"
    yield f"  bias added once, after the sum: {_difference(sum(parts[1:], parts[0]) + bias, whole)}"
    twice = sum((part + bias for part in parts[1:]), parts[0] + bias)
    yield f"  bias added by every rank: {_difference(twice, whole)} (the classic mistake)"
    yield ""


def _qkv() -> Iterator[str]:
    heads, kv_heads, dim = 8, 2, 4
    yield f"QKV with {heads} query heads and {kv_heads} KV heads:"
    for size in (2, 4):
        for rank in range(size):
            q, kv = even_shard(heads, rank, size), kv_head_shard(kv_heads, rank, size)
            q_heads = list(range(q.start, q.start + q.size))
            owned = list(range(kv.start, kv.start + kv.size))
            yield f"  {size} ranks, rank {rank}: query heads {q_heads}, KV heads {owned}"
            # Grouped-query attention: query head h reads KV head h // (heads / kv_heads).
            assert {head // (heads // kv_heads) for head in q_heads} == set(owned)
    yield "  With more ranks than KV heads a KV head is held twice, next to its query heads."
    x, weight = torch.randn(3, 16), torch.randn(heads * dim, 16)
    parts = torch.cat([x @ _rows(weight, rank).T for rank in range(RANKS)], -1)
    yield f"  query projection, heads side by side: {_difference(parts, x @ weight.T)}"
    yield ""


def _mlp() -> Iterator[str]:
    x = torch.randn(3, 8)
    gate, up, down = torch.randn(12, 8), torch.randn(12, 8), torch.randn(8, 12)
    silu = torch.nn.functional.silu
    whole = (silu(x @ gate.T) * (x @ up.T)) @ down.T

    def part(rank: int, gate_rank: int) -> Tensor:
        inner = silu(x @ _rows(gate, gate_rank).T) * (x @ _rows(up, rank).T)
        return inner @ _columns(down, rank).T

    right = sum((part(rank, rank) for rank in range(1, RANKS)), part(0, 0))
    swapped = sum((part(rank, RANKS - 1 - rank) for rank in range(1, RANKS)), part(0, RANKS - 1))
    yield "MLP, down(silu(gate(x)) * up(x)): column, column, row, and one all-reduce at the end."
    yield f"  ranks together: {_difference(right, whole)}"
    yield f"  the gate's shards swapped: {_difference(swapped, whole)} (the suites' canary)"
    yield ""


def _vocabulary() -> Iterator[str]:
    vocab_size, hidden = 151, 8
    table, states = torch.randn(vocab_size, hidden), torch.randn(3, hidden)
    rows = padded_vocab_rows(vocab_size, RANKS)
    logits, looked_up = [], torch.zeros(4, hidden)
    ids = torch.tensor([0, 63, 128, 150])
    yield f"Vocabulary of {vocab_size}: {rows} rows per rank, the last ones padding."
    for rank in range(RANKS):
        shard = vocab_shard(vocab_size, rank, RANKS)
        local = torch.zeros(rows, hidden)
        local[: shard.size] = table[shard.start : shard.start + shard.size]
        logits.append(states @ local.T)
        mine = (ids >= shard.start) & (ids < shard.start + shard.size)
        looked_up[mine] += local[ids[mine] - shard.start]
        yield f"  rank {rank}: rows {shard.start}..{shard.start + shard.size - 1}"
    gathered = torch.cat(logits, -1)
    cut = _difference(gathered[:, :vocab_size], states @ table.T)
    yield f"  logits, {gathered.shape[-1]} gathered columns cut to {vocab_size}: {cut}"
    found = _difference(looked_up, table[ids])
    yield f"  embedding, ranks adding zeros for others' tokens: {found}"
