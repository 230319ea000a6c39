"""Products of few rows with a weight matrix: launch parameters against the library, per shape.

    python3 benchmarks/gpu_rows_linear.py --out DIR [--rows 1,8]

Each product reads weights that are not in the cache, in a graph of products that follow each other
as they do in a decode step. Writes DIR/rows_linear.json and prints a table last.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from engine.commands.bench_common import current_commit
from engine.kernels.rows_dot import DotTuning, rows_dot
from engine.kernels.rows_linear import LinearTuning, rows_linear

# name: (out features, in features, gated, norm, residual)
SHAPES = {
    "0.6B qkv": (4096, 1024, False, True, False),
    "0.6B o": (1024, 2048, False, False, True),
    "0.6B gate_up": (3072, 1024, True, True, False),
    "0.6B down": (1024, 3072, False, False, True),
    "0.6B head": (151936, 1024, False, False, False),
    "8B qkv": (6144, 4096, False, True, False),
    "8B o": (4096, 4096, False, False, True),
    "8B gate_up": (12288, 4096, True, True, False),
    "8B down": (4096, 12288, False, False, True),
    "8B head": (151936, 4096, False, False, False),
}
TUNINGS = {
    1: [(4, 1024, 2), (4, 512, 1), (4, 1024, 4), (2, 2048, 4), (4, 2048, 4), (2, 4096, 4),
        (4, 4096, 8), (1, 2048, 2), (2, 1024, 1), (2, 4096, 8)],
    8: [(16, 256, 1, 3), (16, 256, 1, 5), (16, 256, 1, 8), (32, 256, 2, 3), (32, 256, 2, 5),
        (64, 128, 4, 6), (32, 128, 2, 6), (32, 128, 2, 10), (16, 128, 1, 8), (16, 512, 1, 4)],
}  # fmt: skip
BYTES_BETWEEN_REUSE = 400 * 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=".")
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--processes", type=int, default=14)
    args = parser.parse_args()
    work = [
        (name, int(rows), tuning)
        for name in args.shapes.split(",")
        for rows in args.rows.split(",")
        for tuning in TUNINGS[1 if int(rows) < 4 else 8]
    ]
    with multiprocessing.get_context("fork").Pool(args.processes) as pool:
        failures = dict(item for item in pool.map(compile_one, work, chunksize=1) if item)
    results, table = [], []
    for name in args.shapes.split(","):
        for rows in map(int, args.rows.split(",")):
            found = measure_shape(
                name, rows, [w[2] for w in work if w[:2] == (name, rows)], failures
            )
            results.append(found)
            table.append(line(found))
    record = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__}
    record |= {"commit": current_commit(), "results": results}
    (Path(args.out) / "rows_linear.json").write_text(json.dumps(record, indent=1))
    print("\n".join(["=" * 100, *table]))


def make_case(name, rows, copies):
    out_features, in_features, gated, norm, residual = SHAPES[name]
    width = out_features * (2 if gated else 1)
    weights = torch.randn(copies, width, in_features, device="cuda", dtype=torch.bfloat16)
    weights *= in_features**-0.5
    x = torch.randn(rows, in_features, device="cuda", dtype=torch.bfloat16)
    more = {"gated": gated}
    if norm:
        more |= {"gain": torch.ones(in_features, device="cuda", dtype=torch.bfloat16), "eps": 1e-6}
    if residual:
        more["residual"] = torch.randn(rows, out_features, device="cuda", dtype=torch.bfloat16)
    return x, weights, more


def product(x, weight, tuning, more):
    if len(tuning) == 3:
        return rows_linear(x, weight, tuning=LinearTuning(*tuning), **more)
    more = {name: value for name, value in more.items() if name in ("gated", "residual")}
    return rows_dot(x, weight, tuning=DotTuning(*tuning), **more)


def compile_one(item):
    name, rows, tuning = item
    try:
        x, weights, more = make_case(name, rows, 1)
        product(x, weights[0], tuning, more)
        torch.cuda.synchronize()
    except Exception as error:
        return item, repr(error)[:200]
    return None


def measure_shape(name, rows, tunings, failures):
    out_features, in_features, gated, _, _ = SHAPES[name]
    size = out_features * (2 if gated else 1) * in_features * 2
    copies = max(2, min(40, BYTES_BETWEEN_REUSE // size))
    x, weights, more = make_case(name, rows, copies)
    found = {"name": name, "rows": rows, "bytes": size, "library_us": None, "own_us": {}}
    found["library_us"] = time_chain(lambda w: torch.nn.functional.linear(x, w), weights)
    for tuning in tunings:
        if (name, rows, tuning) in failures:
            found["own_us"][str(tuning)] = failures[name, rows, tuning]
            continue
        found["own_us"][str(tuning)] = time_chain(
            lambda w, tuning=tuning: product(x, w, tuning, more), weights
        )
    return found


def time_chain(run, weights, replays=6):
    """Microseconds per product in a graph that goes once through all weights."""
    run(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            run(weight)
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(weights))
    return sorted(times)[len(times) // 2]


def line(found):
    times = {k: v for k, v in found["own_us"].items() if isinstance(v, float)}
    best = sorted(times, key=times.get)
    rate = found["bytes"] / times[best[0]] / 1e6
    ranked = "  ".join(f"{name} {times[name]:.2f}" for name in best[:5])
    return (
        f"{found['name']:<14} {found['rows']} rows: library {found['library_us']:7.2f} us, "
        f"own {times[best[0]]:7.2f} ({rate:.2f} TB/s)   {ranked}"
    )


if __name__ == "__main__":
    main()
