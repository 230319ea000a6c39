"""Shards reassemble to the full matrices, and sharded layers compute what whole ones do."""

from types import SimpleNamespace

import pytest
import torch
from tp_testing import ThreadGroup, run_ranks

from engine.core.errors import ConfigError
from engine.layers.embedding import OutputHead, VocabParallelEmbedding
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear, merged_parts, qkv_parts
from engine.layers.sharding import check_tp_size, kv_head_shard, valid_tp_sizes
from engine.layers.weights import WeightSlice
from engine.sampler import SamplingBatch, sample
from engine.worker.row_sampler import sample_over_ranks

CPU, F32 = torch.device("cpu"), torch.float32


def fill(slices, full):
    """Copy each slice from the dict of full tensors, as the loader does from files."""
    for item in slices:
        tensor = full[item.name]
        assert tuple(tensor.shape) == item.full_shape
        item.target.copy_(tensor.narrow(item.dim, item.start, item.target.shape[item.dim]))


def lone_group(rank, size):
    return ThreadGroup(rank, SimpleNamespace(size=size))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_kv_heads_are_replicated_when_there_are_fewer_than_ranks(size):
    """BUG-C58: with 4 KV heads and TP 8, rank r holds head r // 2, next to its query heads."""
    for rank in range(size):
        shard = kv_head_shard(4, rank, size)
        if size == 8:
            assert (shard.start, shard.size) == (rank // 2, 1)
        first_query, queries = rank * 16 // size, 16 // size
        needed = {q // 4 for q in range(first_query, first_query + queries)}
        assert needed == set(range(shard.start, shard.start + shard.size))


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 4, 2), (8, 4, 8), (9, 3, 3)])
def test_qkv_shards_concatenate_to_the_full_matrices(heads, kv_heads, size):
    """BUG-C59: every rank holds its own rows, not the first ones."""
    torch.manual_seed(0)
    rows = {"q_proj": heads * 4, "k_proj": kv_heads * 4, "v_proj": kv_heads * 4}
    full = {f"a.{n}.weight": torch.randn(r, 6) for n, r in rows.items()}
    full |= {f"a.{n}.bias": torch.randn(r) for n, r in rows.items()}
    layers = []
    for rank in range(size):
        parts = qkv_parts(heads, kv_heads, 4, lone_group(rank, size))
        layer = ColumnParallelLinear(6, parts, True, F32, CPU)
        fill(layer.weight_slices("a."), full)
        layers.append(layer)
    copies = max(1, size // kv_heads)
    for i, name in enumerate(rows):
        step = 1 if name == "q_proj" else copies
        weights = [layer.weight.split(layer.out_sizes)[i] for layer in layers[::step]]
        biases = [layer.bias.split(layer.out_sizes)[i] for layer in layers[::step]]
        assert torch.equal(torch.cat(weights), full[f"a.{name}.weight"])
        assert torch.equal(torch.cat(biases), full[f"a.{name}.bias"])
        for first in range(0, size, step):
            for other in range(first, first + step):
                mine = layers[other].weight.split(layers[other].out_sizes)[i]
                assert torch.equal(mine, layers[first].weight.split(layers[first].out_sizes)[i])


def test_merged_shards_concatenate_part_by_part():
    full = {f"m.{n}.weight": torch.randn(12, 5) for n in ("gate_proj", "up_proj")}
    halves = []
    for rank in range(3):
        parts = merged_parts(("gate_proj", "up_proj"), 12, lone_group(rank, 3))
        layer = ColumnParallelLinear(5, parts, False, F32, CPU)
        fill(layer.weight_slices("m."), full)
        halves.append(layer.weight.split(4))
    assert torch.equal(torch.cat([h[0] for h in halves]), full["m.gate_proj.weight"])
    assert torch.equal(torch.cat([h[1] for h in halves]), full["m.up_proj.weight"])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_parallel_adds_its_bias_once(size):
    """BUG-C16: the bias is not sliced along the inputs and not counted per rank."""
    torch.manual_seed(0)
    full = {"o.weight": torch.randn(6, 8), "o.bias": torch.randn(6) * 10}
    x = torch.randn(3, 8)

    def rank_output(group):
        layer = RowParallelLinear(8, 6, True, group, F32, CPU)
        fill(layer.weight_slices("o."), full)
        return layer(x[:, layer.columns.start : layer.columns.start + layer.columns.size])

    expected = torch.nn.functional.linear(x, full["o.weight"], full["o.bias"])
    for out in run_ranks(size, rank_output):
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocab", [64, 97, 151])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_an_odd_vocabulary_is_padded_and_cut(vocab, size):
    """Logits have exactly the vocabulary's columns; a rank may hold padding only."""
    torch.manual_seed(0)
    full = {"e.weight": torch.randn(vocab, 8)}
    ids = torch.arange(vocab)

    def outputs(group):
        table = VocabParallelEmbedding(vocab, 8, group, F32, CPU)
        fill(table.weight_slices("e."), full)
        return table(ids), OutputHead(table)(full["e.weight"][:5]), table.rows

    results = run_ranks(size, outputs)
    assert sum(rows.size for _, _, rows in results) == vocab
    for embedded, logits, _ in results:
        assert torch.equal(embedded, full["e.weight"])
        torch.testing.assert_close(logits, full["e.weight"][:5] @ full["e.weight"].T)


@pytest.mark.parametrize("vocab", [64, 100, 151])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_draw_the_same_tokens_without_gathering_logits(vocab, size):
    torch.manual_seed(0)
    full = {"e.weight": torch.randn(vocab, 8)}
    hidden = torch.randn(6, 8)
    zeros = torch.zeros(6, dtype=torch.int64)
    temperatures = torch.tensor([0.0, 1.0, 0.5, 0.0, 2.0, 9.0])
    batch = SamplingBatch(temperatures, torch.arange(6), zeros)

    def drawn(group):
        table = VocabParallelEmbedding(vocab, 8, group, F32, CPU)
        fill(table.weight_slices("e."), full)
        group.all_gather = None
        return sample_over_ranks(OutputHead(table).local(hidden), batch, group, table.rows)

    expected = sample(hidden @ full["e.weight"].T, batch)
    for tokens in run_ranks(size, drawn):
        assert torch.equal(tokens, expected)


def test_invalid_tp_sizes_are_refused_with_the_valid_ones():
    shape = SimpleNamespace(
        num_heads=16, num_kv_heads=4, intermediate_size=96, vocab_size=97, head_dim=8
    )
    assert valid_tp_sizes(shape) == [1, 2, 4, 8, 16]
    with pytest.raises(ConfigError, match=r"valid sizes: \[1, 2, 4, 8, 16\]"):
        check_tp_size(shape, 3)
    nine = SimpleNamespace(num_heads=9, num_kv_heads=3, intermediate_size=1536, vocab_size=49152)
    assert valid_tp_sizes(nine) == [1, 3]


def test_a_slice_knows_where_it_ends():
    item = WeightSlice("w", torch.empty(3, 4), (9, 4), dim=0, start=3)
    assert item.stop == 6
