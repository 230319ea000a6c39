"""The one-kernel all-reduce between processes that share memory, in Triton's interpreter."""

import mmap
import os

import pytest
import torch
import torch.multiprocessing as mp
from kernel_testing import KERNEL_DEVICE

from engine.kernels.all_reduce import new_calls, one_shot_all_reduce, shared_bytes

SLOT_BYTES = 4 * 64
PROGRAMS = 3
# Sizes around the blocks of 16: nothing for most programs, uneven ends, the whole slot.
SIZES = [1, 64, 16, 17, 3, 50, 64, 2, 63]

pytestmark = pytest.mark.skipif(
    KERNEL_DEVICE != "cpu", reason="on a GPU the ranks' memory is shared in another way"
)


def inputs(num_ranks, call, size):
    generator = torch.Generator().manual_seed(call)
    return torch.randn(num_ranks, size, generator=generator)


def _rank(rank, num_ranks, folder):
    os.environ["TRITON_INTERPRET"] = "1"
    size = shared_bytes(num_ranks, SLOT_BYTES, PROGRAMS)
    kept, addresses = [], []
    for peer in range(num_ranks):
        with open(folder / f"memory-{peer}", "r+b") as file:
            memory = mmap.mmap(file.fileno(), size)
        kept.append(torch.frombuffer(memory, dtype=torch.uint8))
        addresses.append(kept[-1].data_ptr())
    peers, calls = torch.tensor(addresses), new_calls(PROGRAMS, torch.device("cpu"))
    calls += 2**31 - 5  # so that the counters overflow on the way
    kept[rank][-4 * num_ranks * PROGRAMS :].view(torch.int32).fill_(2**31 - 5)
    (folder / f"ready-{rank}").touch()
    while not all((folder / f"ready-{peer}").exists() for peer in range(num_ranks)):
        pass
    found = []
    for call, size in enumerate(SIZES):
        x = inputs(num_ranks, call, size)[rank].clone()
        found.append(one_shot_all_reduce(x, peers, calls, rank, SLOT_BYTES, 16, 1))
    torch.save(found, folder / f"found-{rank}.pt")


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_ranks_get_the_same_sums_call_after_call(tmp_path, num_ranks):
    for rank in range(num_ranks):
        size = shared_bytes(num_ranks, SLOT_BYTES, PROGRAMS)
        # Nonsense that would show in a sum if a part were read before it arrived.
        (tmp_path / f"memory-{rank}").write_bytes(b"\x7f" * size)
    mp.spawn(_rank, args=(num_ranks, tmp_path), nprocs=num_ranks)
    found = [torch.load(tmp_path / f"found-{rank}.pt") for rank in range(num_ranks)]
    for call, size in enumerate(SIZES):
        parts = inputs(num_ranks, call, size)
        expected = parts[0].clone()
        for part in parts[1:]:
            expected += part  # in rank order
        for rank in range(num_ranks):
            assert torch.equal(found[rank][call], expected), (call, rank)
