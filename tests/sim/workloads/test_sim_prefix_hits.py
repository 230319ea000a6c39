"""Prefix hits of traces with hash ids, against simple models of an ideal and an LRU cache."""

import random
from array import array
from collections import OrderedDict

import pytest
from sim_testing import TRACES, needs_shared, ours, run

from sim.workloads.readers import TraceOptions, read_trace
from sim.workloads.table import HashedPrefixes, Workload

BLOCK = 512


def hashed_trace(num_rows: int, seed: int) -> Workload:
    """Requests that extend random earlier ones, with chained block ids and partial last blocks."""
    rng = random.Random(seed)
    children: dict[tuple[int, int], int] = {}
    ids, offsets = array("q"), array("q", [0])
    lengths = array("q")
    for _ in range(num_rows):
        node, path = -1, []
        for _ in range(rng.randint(1, 6)):
            node = children.setdefault((node, rng.randint(0, 2)), len(children))
            path.append(node)
        ids.extend(path)
        offsets.append(len(ids))
        lengths.append((len(path) - 1) * BLOCK + rng.choice([BLOCK, BLOCK, rng.randint(1, BLOCK)]))
    # Far enough apart that every request ends before the next one comes.
    arrivals = array("q", [row * 10**10 for row in range(num_rows)])
    outputs = array("q", [2]) * num_rows
    return Workload(
        "hashed", arrivals, lengths, outputs, hashed=HashedPrefixes(BLOCK, ids, offsets)
    )


def expected_hits(workload: Workload, capacity: int | None) -> int:
    """Hit tokens of full blocks, the last token never hit; LRU in whole blocks if bounded."""
    hashed = workload.hashed
    assert hashed is not None
    cache: OrderedDict[int, None] = OrderedDict()
    total = 0
    for row, length in enumerate(workload.prompt_tokens):
        path = hashed.ids[hashed.offsets[row] : hashed.offsets[row + 1]]
        full = path[: length // BLOCK]
        most = (length - 1) // BLOCK
        hits = 0
        while hits < most and full[hits] in cache:
            hits += 1
        total += hits * BLOCK
        # The newest block is touched first, so a prefix outlives its extension.
        for block in reversed(full):
            cache.pop(block, None)
            cache[block] = None
        while capacity is not None and len(cache) > capacity:
            cache.popitem(last=False)
    return total


@pytest.mark.parametrize("seed", range(3))
def test_an_unlimited_pool_hits_every_prefix_seen_before(seed):
    workload = hashed_trace(150, seed)
    finished = run(workload, block_size=BLOCK, num_kv_blocks=10_000, max_model_len=16_384)
    assert ours(finished)["first_admission_hit_tokens"] == expected_hits(workload, None) > 0


@pytest.mark.parametrize("seed", range(3))
def test_smaller_blocks_find_at_least_as_much(seed):
    workload = hashed_trace(60, seed)
    finished = run(workload, block_size=16, num_kv_blocks=100_000, max_model_len=16_384)
    assert ours(finished)["first_admission_hit_tokens"] >= expected_hits(workload, None)


def test_hits_fall_with_the_pool_as_in_an_lru_cache():
    """One request at a time; copies and partial blocks keep the pool from being exactly LRU."""
    workload = hashed_trace(400, 0)
    rates = []
    for capacity in (16, 40, 100, 400):
        finished = run(
            workload, block_size=BLOCK, num_kv_blocks=capacity, max_num_seqs=1,
            max_model_len=BLOCK * 8,
        )  # fmt: skip
        hits = ours(finished)["first_admission_hit_tokens"]
        assert isinstance(hits, int)
        low, high = expected_hits(workload, capacity - 8), expected_hits(workload, capacity)
        assert 0.97 * low <= hits <= 1.03 * high
        rates.append(hits)
    assert rates == sorted(rates) and rates[0] < rates[-1]


def test_no_caching_means_no_hits():
    finished = run(
        hashed_trace(40, 0), block_size=BLOCK, prefix_caching=False, max_model_len=16_384
    )
    assert ours(finished)["prefix_hit_tokens"] == 0


@needs_shared
@pytest.mark.shared
def test_mooncake_conversation_reaches_its_ideal_hit_rate():
    """37.36 % ideal, less the hit limit and what same-time arrivals cost."""
    trace = read_trace(TRACES / "mooncake_conversation.jsonl.gz", TraceOptions())
    finished = run(
        trace, model="qwen3-8b", hardware="h200", block_size=512, num_kv_blocks=10**6,
        max_model_len=131_072,
    )  # fmt: skip
    assert finished.summary.completed == 12_031
    assert ours(finished)["first_admission_hit_rate"] == pytest.approx(0.3734, abs=0.0005)


LRU_PERCENT = {500: 4.30, 2000: 5.54, 5000: 11.40, 10_000: 21.57, 20_000: 29.35, 50_000: 36.15}


def mooncake_hit_percent(pool: int, trace: Workload) -> float:
    """First-admission hit rate with one seat."""
    finished = run(
        trace, model="qwen3-8b", hardware="h200", block_size=512, num_kv_blocks=pool,
        max_model_len=131_072, max_num_seqs=1, cost="constant:1",
    )  # fmt: skip
    rate = ours(finished)["first_admission_hit_rate"]
    assert isinstance(rate, float)
    return rate * 100


@needs_shared
@pytest.mark.shared
def test_mooncake_with_one_seat_follows_the_lru_table():
    """Close to it: the table's cache keeps partial blocks, where the pool reuses them first.

    With a single output token each, which is fast; with all of them see below.
    """
    trace = read_trace(TRACES / "mooncake_conversation.jsonl.gz", TraceOptions())
    trace.output_tokens = array("q", [1]) * len(trace)
    for pool in (500, 20_000):
        assert mooncake_hit_percent(pool, trace) == pytest.approx(LRU_PERCENT[pool], abs=0.75)


@needs_shared
@pytest.mark.shared
@pytest.mark.nightly
@pytest.mark.parametrize("pool", LRU_PERCENT)
def test_mooncake_with_its_outputs_follows_the_lru_table(pool):
    trace = read_trace(TRACES / "mooncake_conversation.jsonl.gz", TraceOptions())
    assert mooncake_hit_percent(pool, trace) == pytest.approx(LRU_PERCENT[pool], abs=0.25)
