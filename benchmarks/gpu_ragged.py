"""Decode attention: split programs per row against a worklist, over batches and spreads of length.

    python3 benchmarks/gpu_ragged.py --out DIR

Times of one layer in a graph of many layers' caches. Writes DIR/ragged.json, prints a table last.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from engine.attention.base import AttentionMetadata
from engine.attention.triton_backend import TritonAttention
from engine.kernels.ragged import RaggedTuning, ragged_attention, ragged_sizes
from engine.kernels.worklist import Worklist, fill_worklist

TUNINGS = [
    RaggedTuning(16, 64, 4, 3, 4, 2, 128),
    RaggedTuning(16, 64, 4, 3, 5, 2, 128),
    RaggedTuning(16, 64, 4, 3, 4, 4, 128),
    RaggedTuning(16, 64, 4, 3, 4, 1, 128),
    RaggedTuning(16, 64, 4, 4, 3, 2, 128),
    RaggedTuning(16, 128, 4, 2, 3, 2, 128),
    RaggedTuning(16, 128, 8, 3, 2, 2, 128),
]
LAYERS = 8


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=".")
    args = parser.parse_args()
    results, table = [], []
    for batch, spread, heads in itertools.product((24, 64, 256), ("equal", "wide"), (16, 32)):
        case = Case(batch, spread, heads)
        found = {"batch": batch, "spread": spread, "heads": heads, "bytes": case.num_bytes}
        found["split_us"] = case.split_us()
        found["worklist_us"] = {}
        for tuning in TUNINGS:
            found["worklist_us"][str(tuning)] = case.worklist_us(tuning)
        results.append(found)
        best = min(found["worklist_us"].values())
        ranked = " ".join(f"{v:.1f}" for v in found["worklist_us"].values())
        table.append(
            f"{batch:4d} rows, {spread:5}, {heads} heads: split {found['split_us']:7.1f} us "
            f"({case.num_bytes / found['split_us'] / 1e6:.2f} TB/s), worklist {best:7.1f} "
            f"({case.num_bytes / best / 1e6:.2f} TB/s)  [{ranked}]"
        )
    (Path(args.out) / "ragged.json").write_text(json.dumps(results, indent=1))
    print("\n".join(["=" * 100, *table]))


class Case:
    def __init__(self, batch, spread, heads):
        rng = random.Random(batch)
        contexts = [820 if spread == "equal" else rng.randint(50, 2000) for _ in range(batch)]
        self.kv_heads, self.page, dim = 8, 16, 128
        pages = [-(-c // self.page) for c in contexts]
        num_blocks = sum(pages)
        order = torch.randperm(num_blocks).int().tolist()
        tables = torch.zeros(batch, 256, dtype=torch.int32)
        start = 0
        for row, count in enumerate(pages):
            tables[row, :count] = torch.tensor(order[start : start + count], dtype=torch.int32)
            start += count
        self.tables = tables.cuda()
        self.lens = torch.tensor(contexts, dtype=torch.int32, device="cuda")
        shape = (2, LAYERS, num_blocks, self.page, self.kv_heads, dim)
        cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.caches = [cache[:, layer] for layer in range(LAYERS)]
        self.q = torch.randn(batch, heads, dim, device="cuda", dtype=torch.bfloat16)
        self.num_bytes = sum(contexts) * self.kv_heads * dim * 2 * 2
        self.scale = dim**-0.5

    def split_us(self):
        slots = torch.full_like(self.lens, -1, dtype=torch.int64)
        meta = AttentionMetadata(slots, len(self.q), self.tables, self.lens, 4096)
        backend = TritonAttention()
        meta = backend.prepare(meta)
        self.expected = backend.forward(self.q, None, None, self.caches[0], meta, self.scale)
        return time_layers(
            lambda cache: backend.forward(self.q, None, None, cache, meta, self.scale), self.caches
        )

    def worklist_us(self, tuning):
        heads, dim = self.q.shape[1:]
        sizes = ragged_sizes(heads, self.kv_heads, dim, self.q.dtype, self.q.device, tuning)
        work = Worklist.new(self.tables, torch.empty_like(self.q), len(self.q), sizes)
        rows = torch.arange(len(self.q), dtype=torch.int32, device="cuda")
        fill_worklist(work, sizes, rows, rows, torch.ones_like(rows), self.lens, len(self.q))
        out = ragged_attention(self.q, self.caches[0], work, self.scale, tuning)
        torch.testing.assert_close(out, self.expected, rtol=3e-2, atol=3e-2)
        return time_layers(
            lambda cache: ragged_attention(self.q, cache, work, self.scale, tuning), self.caches
        )


def time_layers(run, caches, replays=10):
    run(caches[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for cache in caches:
            run(cache)
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(caches))
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    main()
