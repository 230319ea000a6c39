"""Small all-reduces over memory that the GPUs of one host share, without NCCL's latency.

Used where it was measured to be faster: two ranks, tensors of the size of a decode step's hidden
states. Whatever is missing (peer access, Triton, torch's symmetric memory), NCCL does it all.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.group import TpGroup

LARGEST_BYTES = 8 * 2**20
MEASURED_RANKS = 2
_NUM_PROGRAMS = 64
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class OneShotAllReduce:
    """One rank's end; `memory` and `handle` keep the shared memory mapped."""

    rank: int
    peers: Tensor
    calls: Tensor
    memory: Tensor
    handle: Any  # torch's symmetric memory, untyped

    def takes(self, t: Tensor) -> bool:
        """Whether the tensor is small and aligned; the same on every rank for equal shapes."""
        num_bytes = t.numel() * t.itemsize
        return (
            0 < num_bytes <= LARGEST_BYTES
            and t.dtype in (torch.bfloat16, torch.float16, torch.float32)
            and t.is_contiguous()
            and t.data_ptr() % _ALIGNMENT == 0
        )

    def all_reduce(self, t: Tensor) -> Tensor:
        """Sum over the ranks, in place; returns `t`. Safe inside a CUDA graph."""
        from engine.kernels.all_reduce import one_shot_all_reduce

        return one_shot_all_reduce(t, self.peers, self.calls, self.rank, LARGEST_BYTES)


def connect_group(rank: int, size: int, device: torch.device) -> TpGroup:
    """The group of all ranks of the default process group, by the fastest means; collective."""
    return TpGroup(rank, size, fast=connect_one_shot(rank, size, device))


def connect_one_shot(rank: int, size: int, device: torch.device) -> OneShotAllReduce | None:
    """The shared memory of all ranks of the default group, or None on every rank.

    A collective call. It is tried out against NCCL before it is used.
    """
    if device.type != "cuda" or size != MEASURED_RANKS:
        return None
    if not _all_agree(_is_possible(rank, size), device):
        return None
    try:
        one_shot = _connect(rank, size, device)
    except (RuntimeError, ImportError):
        one_shot = None
    if not _all_agree(one_shot is not None, device):
        return None
    assert one_shot is not None
    return one_shot if _all_agree(_agrees_with_nccl(one_shot, device), device) else None


def _is_possible(rank: int, size: int) -> bool:
    reachable = all(
        peer == rank or torch.cuda.can_device_access_peer(rank, peer) for peer in range(size)
    )
    return reachable and importlib.util.find_spec("triton") is not None


def _connect(rank: int, size: int, device: torch.device) -> OneShotAllReduce:
    # Plain loads and stores are all that is needed of the link.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed._symmetric_memory as symmetric

    from engine.kernels.all_reduce import new_calls, shared_bytes

    num_bytes = shared_bytes(size, LARGEST_BYTES, _NUM_PROGRAMS)
    memory = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    memory.zero_()
    group = dist.group.WORLD
    assert group is not None
    handle = symmetric.rendezvous(memory, group)
    offset = memory.data_ptr() - handle.buffer_ptrs[rank]
    addresses = [address + offset for address in handle.buffer_ptrs]
    peers = torch.tensor(addresses, dtype=torch.int64, device=device)
    torch.cuda.synchronize(device)
    dist.barrier()  # every rank's signals are zero before any is set
    return OneShotAllReduce(rank, peers, new_calls(_NUM_PROGRAMS, device), memory, handle)


def _agrees_with_nccl(one_shot: OneShotAllReduce, device: torch.device) -> bool:
    generator = torch.Generator(device=device).manual_seed(one_shot.rank)
    for numel in (8, 4096, LARGEST_BYTES // 4):
        x = torch.randn(numel, generator=generator, device=device)
        expected = x.clone()
        dist.all_reduce(expected)
        if not torch.equal(one_shot.all_reduce(x), expected):
            return False
    return True


def _all_agree(answer: bool, device: torch.device) -> bool:
    votes = torch.tensor([int(answer)], device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes.item())
