"""Hit rate of a trace's prompts by KV capacity: the kernel with a host tier against LRU.

The prompts of a Mooncake trace come one at a time. LRU is worked out from stack distances alone,
without the kernel; both count whole blocks of the trace.

    python -m benchmarks.kv_tier_curve TRACE [--requests N]
"""

from __future__ import annotations

import argparse
import gzip
import json
from array import array
from collections.abc import Sequence
from pathlib import Path

from engine.core import KernelConfig, Prompt, Request, Scheduler

BLOCK = 512  # tokens of a hash id
SHRUNK = 2  # a block of the trace as tokens of the kernel: its id's halves
POOL = 512


def read_prompts(path: Path, limit: int | None = None) -> list[tuple[int, ...]]:
    """The ids of every prompt's full blocks, less a block that its last token ends."""
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines][:limit]
    return [tuple(row["hash_ids"][: (row["input_length"] - 1) // BLOCK]) for row in rows]


def lru_hits(prompts: Sequence[Sequence[int]], capacities: Sequence[int]) -> list[int]:
    """Blocks found in an LRU cache of each capacity, from exact stack distances (Mattson 1970).

    All blocks of a prompt are looked up before any is used, and the first is used last. The
    distance of a block is the number of others that were used since, counted in a Fenwick tree.
    """
    size = sum(map(len, prompts)) + 1
    tree = array("q", bytes(8 * (size + 1)))

    def add(place: int, by: int) -> None:
        while place <= size:
            tree[place] += by
            place += place & -place

    def used_up_to(place: int) -> int:
        total = 0
        while place:
            total += tree[place]
            place -= place & -place
        return total

    last: dict[int, int] = {}
    hits, now = [0] * len(capacities), 0
    for prompt in prompts:
        known = [block for block in prompt if block in last]
        for block in known:
            distance = len(last) - used_up_to(last[block])
            for index, capacity in enumerate(capacities):
                hits[index] += distance < capacity
        for block in reversed(prompt):
            now += 1
            if block in last:
                add(last[block], -1)
            last[block] = now
            add(now, 1)
    return hits


def kernel_hits(prompts: Sequence[Sequence[int]], pool: int, host: int) -> tuple[int, int]:
    """Blocks that the kernel finds in a pool of `pool` blocks, and in the host tier behind it."""
    longest = max(map(len, prompts)) * SHRUNK + 2
    scheduler = Scheduler(
        KernelConfig(
            num_blocks=pool,
            max_model_len=longest,
            block_size=SHRUNK,
            max_num_batched_tokens=longest,
            host_blocks=host,
        )
    )
    found = loaded = 0
    for number, blocks in enumerate(prompts):
        tokens = [part for block in blocks for part in divmod(block, 1 << 15)]
        scheduler.add(Request(number, Prompt([*tokens, 0]), max_tokens=1))
        plan = scheduler.schedule()
        found += plan.admitted[0].hit_tokens // SHRUNK
        loaded += sum(not copy.to_host for copy in plan.copies)
        scheduler.commit(plan, [0])
    return found - loaded, loaded


def main() -> None:
    """Prints one row per capacity."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int)
    arguments = parser.parse_args()
    prompts = read_prompts(arguments.trace, arguments.requests)
    total = sum(map(len, prompts))
    hosts = [0, *(POOL << shift for shift in range(9))]
    lru = lru_hits(prompts, [POOL + host - 1 for host in hosts])
    print(f"{len(prompts)} prompts, {total} blocks; hit rates in %")
    print("pool   host  from pool from host      both       LRU")
    for host, truth in zip(hosts, lru, strict=True):
        pool_hits, host_hits = kernel_hits(prompts, POOL, host)
        parts = [100 * hits / total for hits in (pool_hits, host_hits, pool_hits + host_hits)]
        row = "".join(f"{part:10.2f}" for part in (*parts, 100 * truth / total))
        print(f"{POOL:4} {host:6} {row}")


if __name__ == "__main__":
    main()
