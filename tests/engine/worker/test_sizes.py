"""Sizes that are computed at start: graph batches, the KV pool, block tables."""

from __future__ import annotations

import random

import pytest

from engine.core.errors import ConfigError
from engine.worker.graphs import (
    bucket_for,
    graph_batch_sizes,
    prompt_graph_sizes,
    reserved_graph_bytes,
)
from engine.worker.kv_cache import (
    KvShape,
    MemoryProfile,
    OutOfMemoryAtStart,
    agreed_num_blocks,
    fit_model_len,
    num_blocks_in,
    table_width,
)

SHAPE = KvShape(num_layers=28, block_size=256, num_kv_heads=8, head_dim=128, dtype_bytes=2)


def test_graph_sizes_cover_every_batch_and_exceed_none():  # BUG-B23, BUG-B24, BUG-C08
    for largest in range(1, 601):
        sizes = graph_batch_sizes(largest)
        assert list(sizes) == sorted(set(sizes))
        assert sizes[0] >= 1
        assert sizes[-1] == largest
        for batch in range(1, largest + 1):
            bucket = bucket_for(batch, sizes)
            assert bucket >= batch
            smaller = [size for size in sizes if size >= batch]
            assert bucket == smaller[0]


def test_padding_of_a_large_decode_batch_is_small():
    sizes = graph_batch_sizes(256)
    assert bucket_for(241, sizes) == 248
    assert max(bucket_for(batch, sizes) - batch for batch in range(8, 257)) == 7


def test_padded_steps_end_where_the_device_needs_longer_than_the_host():
    small, large, huge = (prompt_graph_sizes(8192, n) for n in (440_000_000, 7 * 10**9, 10**12))
    assert small[-1] == 2048
    assert large[-1] == 512
    assert huge == (16,)
    for tokens in (1, 16, 100, 512, 600, 5000):
        sizes = prompt_graph_sizes(tokens, 440_000_000)
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] == min(tokens, 2048)


def test_block_bytes_are_those_of_the_known_model():  # 28 MiB for Qwen3-0.6B
    assert SHAPE.block_bytes == 28 * 1024**2


def test_the_pool_gets_what_the_peaks_leave():  # BUG-C64
    profile = MemoryProfile(
        total_bytes=100,
        other_bytes=0,
        weight_bytes=10,
        prefill_peak_bytes=3,
        sampling_peak_bytes=4,
        graph_bytes=2,
    )
    assert profile.kv_budget_bytes(0.9) == 90 - 10 - 4 - 2


def test_no_component_is_forgotten_in_the_budget():  # BUG-B28
    rng = random.Random(0)
    for _ in range(200):
        used = {
            name: rng.randrange(1, 1000)
            for name in (
                "other_bytes",
                "weight_bytes",
                "prefill_peak_bytes",
                "sampling_peak_bytes",
                "graph_bytes",
            )
        }
        base = MemoryProfile(total_bytes=100_000, **used).kv_budget_bytes(0.5)
        for name in used:
            more = MemoryProfile(total_bytes=100_000, **{**used, name: used[name] + 5000})
            assert more.kv_budget_bytes(0.5) < base


def test_too_little_memory_names_the_numbers():
    profile = MemoryProfile(80 * 2**30, 2**30, 90 * 2**30, 0, 0, 0)
    with pytest.raises(OutOfMemoryAtStart) as caught:
        num_blocks_in(profile.kv_budget_bytes(0.9), SHAPE, profile.describe(0.9))
    for number in ("80.00 GiB", "90.00 GiB weights", "0.9", f"{28 * 2**20:,}"):
        assert number in str(caught.value)


def test_every_rank_uses_the_smallest_pool():  # BUG-B27, BUG-C07
    assert agreed_num_blocks([100, 63]) == 63


def test_a_requested_length_that_the_pool_cannot_hold_is_refused():
    assert fit_model_len(128, 4096, 8, 16) == 128
    with pytest.raises(ConfigError, match=r"max_model_len=129: .*8 blocks of 16 = 128 tokens"):
        fit_model_len(129, 4096, 8, 16)


def test_a_length_taken_from_the_model_is_lowered_to_the_pool():
    assert fit_model_len(None, 4096, 8, 16) == 128
    assert fit_model_len(None, 64, 8, 16) == 64


def test_tables_have_a_column_for_the_last_position():  # BUG-C09, BUG-C104
    for block_size in (1, 2, 3, 16, 256):
        for max_model_len in range(2, 600, 7):
            width = table_width(max_model_len, block_size)
            assert (max_model_len - 1) // block_size < width
            assert (width - 1) * block_size < max_model_len


def test_graphs_share_one_pool_of_activations():
    one, many = reserved_graph_bytes(1, 1000), reserved_graph_bytes(10, 1000)
    assert many - one == 9 * (one - 1000)
