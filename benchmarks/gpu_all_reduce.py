"""All-reduce of a decode step's hidden states on two GPUs: NCCL, torch's and our own kernel.

    python3 benchmarks/gpu_all_reduce.py --out DIR [--sweep]

Every time is that of one call among 40 in a CUDA graph, the median of 15 replays, on rank 0. Sums
are compared with those of the same inputs on one device, with fresh inputs in every call.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from engine.commands.bench_common import current_commit

SHAPES = [
    (1, 1024),
    (16, 1024),
    (64, 1024),
    (256, 1024),
    (128, 4096),
    (256, 4096),
    (512, 4096),
    (1024, 4096),
]
LARGE_SHAPES = [(16000, 1024), (16000, 4096)]
SWEEP = [(p, b, w) for p in (32, 64, 128) for b, w in ((2048, 8), (4096, 16), (8192, 16))]
CALLS, REPLAYS, CHECKS = 40, 15, 60
NUM_RANKS = 2


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=".")
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(folder, args.sweep), nprocs=NUM_RANKS)
        record = json.loads((Path(folder) / "record.json").read_text())
    record["commit"] = current_commit()
    out = Path(args.out) / "gpu_all_reduce.json"
    out.write_text(json.dumps(record, indent=1) + "\n")
    print_table(record)


def rank_main(rank, folder, sweep):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=NUM_RANKS,
        device_id=device,
    )
    record = {"benchmark": "all_reduce", "command": "gpu_all_reduce.py --out DIR --sweep"}
    record |= {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}
    record["rows"] = []
    ways = dict(make_ways(rank, device, sweep))
    for shape in SHAPES + LARGE_SHAPES:
        for name, way in ways.items():
            row = {"shape": shape, "way": name}
            if shape in LARGE_SHAPES and name != "nccl":
                continue
            try:
                row |= measure(way, shape, device, rank)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            record["rows"].append(row)
    if rank == 0:
        (Path(folder) / "record.json").write_text(json.dumps(record))
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)


def make_ways(rank, device, sweep):
    import torch.distributed._symmetric_memory as symmetric

    from engine.distributed.one_shot import LARGEST_BYTES, connect_one_shot
    from engine.kernels.all_reduce import new_calls, one_shot_all_reduce

    yield "nccl", nccl
    one_shot = connect_one_shot(rank, NUM_RANKS, device)
    if rank == 0:
        print("one-shot connected:", one_shot is not None, flush=True)
    if one_shot is not None:
        yield "lockstep", one_shot.all_reduce
        for programs, block, warps in SWEEP if sweep else ():
            # Another number of programs has signals of its own.
            other = connect_with(programs, rank, device)
            run = partial(
                one_shot_all_reduce, peers=other.peers, calls=new_calls(programs, device),
                rank=rank, slot_bytes=LARGEST_BYTES, block=block, num_warps=warps,
            )  # fmt: skip
            run.keep = other
            yield f"lockstep {programs} programs, {block} x {warps} warps", run
    buffer = symmetric.empty(LARGEST_BYTES, dtype=torch.uint8, device=device)
    symmetric.rendezvous(buffer, dist.group.WORLD)
    yield "torch one_shot_copy", partial(torch_one_shot, buffer)


def connect_with(programs, rank, device):
    from engine.distributed import one_shot

    before, one_shot._NUM_PROGRAMS = one_shot._NUM_PROGRAMS, programs
    try:
        return one_shot._connect(rank, NUM_RANKS, device)
    finally:
        one_shot._NUM_PROGRAMS = before


def nccl(x):
    dist.all_reduce(x)
    return x


def torch_one_shot(buffer, x):
    own = buffer.view(x.dtype)[: x.numel()].view(x.shape)
    group = dist.group.WORLD.group_name
    return torch.ops.symm_mem.one_shot_all_reduce_copy(own, x, "sum", group)


def measure(way, shape, device, rank):
    wrong = check(way, shape, device)
    inputs = [torch.randn(shape, device=device).bfloat16() for _ in range(CALLS)]
    for x in inputs[:2]:
        way(x)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for x in inputs:
            way(x)
    times = []
    for _ in range(REPLAYS):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return {"us": statistics.median(times), "us_min": min(times), "wrong_calls": wrong}


def check(way, shape, device):
    """Calls whose sum differs from that of the same inputs on one device, in any bit."""
    wrong = 0
    for call in range(CHECKS if shape not in LARGE_SHAPES else 2):
        parts = []
        for peer in range(NUM_RANKS):
            generator = torch.Generator(device=device).manual_seed(call * NUM_RANKS + peer)
            x = torch.randn(shape, generator=generator, device=device)
            parts.append(x.bfloat16())
        expected = (parts[0].float() + parts[1].float()).bfloat16()
        wrong += not torch.equal(way(parts[dist.get_rank()].clone()), expected)
    return wrong


def print_table(record):
    names = list(dict.fromkeys(row["way"] for row in record["rows"]))
    print("=" * 100)
    print(f"{'us per call (wrong calls)':<40}", *(f"{a}x{b:<6}" for a, b in SHAPES + LARGE_SHAPES))
    for name in names:
        cells = []
        for shape in SHAPES + LARGE_SHAPES:
            rows = [r for r in record["rows"] if r["way"] == name and tuple(r["shape"]) == shape]
            row = rows[0] if rows else {}
            wrong = f"({row['wrong_calls']})" if row.get("wrong_calls") else ""
            cells.append(f"{row['us']:.1f}{wrong}" if "us" in row else row.get("error", "-")[:60])
        print(f"{name:<40}", *(f"{cell:<9}" for cell in cells))


if __name__ == "__main__":
    main()
