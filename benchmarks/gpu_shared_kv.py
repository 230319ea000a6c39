"""Measures what decode attention pays for KV blocks that several sequences share.

    python benchmarks/gpu_shared_kv.py [--out FILE]

Sequences of a batch belong to groups that share a prefix, as in a served system prompt. Three
passes over 36 layers' caches (Qwen3-8B: 8 KV heads of 128, bfloat16) in a CUDA graph: every
sequence with its own prefix, prefixes shared within a group, no prefix. The first gives the price
of a token read from memory, the difference of the others what a repeated read of a shared token
costs relative to it. The cost model takes that ratio as `SHARED_READ_COST`
(sim/cost/terms.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial

import torch

from engine.attention.base import AttentionMetadata
from engine.attention.select import select_backend

LAYERS, KV_HEADS, HEADS, HEAD_DIM = 36, 8, 32, 128
PREFIX, OWN, GROUPS = 1024, 360, 8
BATCHES = (16, 24, 32, 48)
REPEATS = 30


def block_tables(batch, page, prefix, shared, seed):
    """One table of each sequence's blocks; groups are drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    prefix_pages, own_pages = prefix // page, -(-OWN // page)
    owners = torch.randint(GROUPS, (batch,), generator=generator) if shared else torch.arange(batch)
    num_owners = GROUPS if shared else batch
    num_pages = num_owners * prefix_pages + batch * own_pages
    order = torch.randperm(num_pages, generator=generator).int()
    prefixes = order[: num_owners * prefix_pages].view(num_owners, prefix_pages)
    own = order[num_owners * prefix_pages :].view(batch, own_pages)
    reads = len(set(owners.tolist()))
    return torch.cat([prefixes[owners], own], dim=1).cuda(), num_pages, reads


def attend(backend, queries, caches, meta):
    for q, cache in zip(queries, caches, strict=True):
        backend.forward(q, None, None, cache, meta, HEAD_DIM**-0.5)


def pass_us(backend, batch, page, prefix, shared, seed):
    """Median time of one pass over all layers, and how many prefixes are read at least once."""
    tables, num_pages, reads = block_tables(batch, page, prefix, shared, seed)
    context = prefix + OWN
    shape = (2, num_pages, page, KV_HEADS, HEAD_DIM)
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    caches = [torch.randn(shape, **options) for _ in range(LAYERS)]
    queries = [torch.randn(batch, HEADS, HEAD_DIM, **options) for _ in range(LAYERS)]
    slots = torch.full((batch,), -1, device="cuda")
    lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    meta = backend.prepare(AttentionMetadata(slots, batch, tables, lens, context))
    once = partial(attend, backend, queries, caches, meta)
    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times), reads


def study(name, page):
    backend = select_backend(name, HEAD_DIM, page, torch.bfloat16, torch.device("cuda"))
    rows = []
    for batch in BATCHES:
        own_us, _ = pass_us(backend, batch, page, 0, False, 1)
        unique_us, _ = pass_us(backend, batch, page, PREFIX, False, 1)
        shared = [pass_us(backend, batch, page, PREFIX, True, seed) for seed in (1, 2, 3)]
        token_ns = (unique_us - own_us) / (batch * PREFIX) * 1e3
        ratios = [
            ((us - own_us) * 1e3 / (token_ns * PREFIX) - reads) / (batch - reads)
            for us, reads in shared
        ]
        rows.append(
            {
                "backend": name,
                "block_size": page,
                "batch": batch,
                "own_us": round(own_us, 1),
                "unique_us": round(unique_us, 1),
                "shared_us": [round(us, 1) for us, _ in shared],
                "token_ns": round(token_ns, 2),
                "repeated_read_cost": round(statistics.mean(ratios), 3),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    rows = study("triton", 16) + study("triton", 256)
    try:
        rows += study("flash_attn", 256)
    except Exception as failure:
        print("flash_attn left out:", failure)
    document = {
        "command": "python benchmarks/gpu_shared_kv.py",
        "commit": arguments.commit,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "prefix_tokens": PREFIX,
        "own_tokens": OWN,
        "groups": GROUPS,
        "rows": rows,
    }
    if arguments.out:
        with open(arguments.out, "w") as file:
            file.write(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
