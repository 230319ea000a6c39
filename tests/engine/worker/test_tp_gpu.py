"""Two GPUs: sums in one kernel, and draws from logits that are split between them."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from engine.distributed.one_shot import LARGEST_BYTES, connect_group
from engine.layers.sharding import vocab_shard
from engine.sampler import SamplingBatch, sample
from engine.worker.row_sampler import sample_over_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SIZE = 2
VOCAB = 1001
# Odd rows are not a multiple of 16 bytes, so a call may read past its end or skip its last part.
SHAPES = [(1, 8), (3, 1000), (256, 1024), (77, 4096), (1024, 4096)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def _rank(rank, folder):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE, device_id=device
    )
    group = connect_group(rank, SIZE, device)
    found = {
        "is fast": group.fast is not None,
        "sums": sums(group, device),
        "graph": sums_in_a_graph(group, device),
        "largest": group.all_reduce_max(
            torch.tensor([rank - 1, -(2**62) - rank, 2**40 - rank], device=device)
        ).tolist(),
        "drawn": drawn(group, device).tolist(),
        "expected": sample(logits(device), batch(device)).tolist(),
    }
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    torch.cuda.synchronize()


def inputs(shape, dtype, seed, device):
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(SIZE, *shape, generator=generator, device=device).to(dtype)
    return x, (x[0].float() + x[1].float()).to(dtype)


def sums(group, device):
    """Wrong or untaken calls among many, of all sizes in turn."""
    wrong = []
    for call in range(120):
        shape, dtype = SHAPES[call % len(SHAPES)], DTYPES[call % len(DTYPES)]
        x, expected = inputs(shape, dtype, call, device)
        taken = group.fast is not None and group.fast.takes(x[group.rank])
        small = expected.numel() * expected.itemsize <= LARGEST_BYTES
        if taken is not small or not torch.equal(group.all_reduce(x[group.rank].clone()), expected):
            wrong.append((call, shape, str(dtype)))
    return wrong


def sums_in_a_graph(group, device):
    """An odd number of calls in a graph that is replayed, with eager calls in between."""
    x = torch.zeros(64, 1024, device=device, dtype=torch.bfloat16)
    group.all_reduce(x.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        once = group.all_reduce(x.clone())
        twice = group.all_reduce(once.clone())
        thrice = group.all_reduce(twice.clone())
    wrong = 0
    for replay in range(30):
        both, expected = inputs(x.shape, x.dtype, 1000 + replay, device)
        x.copy_(both[group.rank])
        graph.replay()
        wrong += not torch.equal(once, expected)
        wrong += not torch.equal(thrice, expected * 4)
        wrong += not torch.equal(group.all_reduce(both[group.rank].clone()), expected)
    return wrong


def logits(device):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, VOCAB, generator=generator).mul(3).to(torch.bfloat16)
    rows[5].fill_(-1.0)
    return rows.to(device)


def batch(device):
    rows = torch.arange(64, device=device)
    return SamplingBatch((rows % 4) * 0.5, rows - 7, rows * 3)


def drawn(group, device):
    shard = vocab_shard(VOCAB, group.rank, SIZE)
    local = logits(device)[:, shard.start : shard.start + shard.size]
    return sample_over_ranks(local, batch(device), group, shard)


def test_two_gpus_sum_and_draw_as_one(tmp_path):
    mp.spawn(_rank, args=(tmp_path,), nprocs=SIZE)
    for rank in range(SIZE):
        found = torch.load(tmp_path / f"{rank}.pt")
        if torch.cuda.can_device_access_peer(0, 1):
            assert found["is fast"]
        assert found["sums"] == []
        assert found["graph"] == 0
        assert found["largest"] == [0, -(2**62), 2**40]
        assert found["drawn"] == found["expected"]
