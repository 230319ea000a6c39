# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202 (Triton gives its own meaning to annotations)
"""All-reduce in one kernel: push to every rank's memory, meet, add up what arrived.

Each program owns a part of the tensor and meets only the same program of the other ranks, so it
waits for nothing that could be scheduled after it. A program counts its calls. Their parity picks
one of two slots: a rank that starts call n + 1 has met the others in call n, so they have ended
call n - 1, and the slot that call n + 1 writes is read by nobody.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _one_shot_kernel(
    x_ptr,
    peers_ptr,  # int64 [RANKS]: address of every rank's shared memory, as this rank sees it
    calls_ptr,  # int32 [programs], this rank's own
    numel,
    slot_numel,  # elements that a rank may send in one call
    signal_offset,  # bytes from the start of the shared memory to its signals
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    dtype = x_ptr.dtype.element_ty
    call = tl.load(calls_ptr + program)
    slot = (call & 1).to(tl.int64) * RANKS * slot_numel
    for start in tl.range(program * BLOCK, numel, programs * BLOCK):
        at = start + lane
        x = tl.load(x_ptr + at, mask=at < numel)
        for step in tl.static_range(1, RANKS):
            peer = tl.load(peers_ptr + (RANK + step) % RANKS).to(tl.pointer_type(dtype))
            target = tl.multiple_of(peer, 16) + slot + RANK * slot_numel
            tl.store(target + at, x, mask=at < numel)
    # All stores of this program come before its signals.
    tl.debug_barrier()
    for step in tl.static_range(1, RANKS):
        peer = tl.load(peers_ptr + (RANK + step) % RANKS) + signal_offset
        signal = peer.to(tl.pointer_type(tl.int32)) + RANK * programs + program
        tl.atomic_xchg(signal, call + 1, sem="release", scope="sys")
    own = tl.load(peers_ptr + RANK)
    for step in tl.static_range(1, RANKS):
        signals = (own + signal_offset).to(tl.pointer_type(tl.int32))
        signal = signals + (RANK + step) % RANKS * programs + program
        # A rank may be one call ahead already; the difference survives an overflow.
        while tl.atomic_add(signal, 0, sem="acquire", scope="sys") - (call + 1) < 0:
            pass
    tl.debug_barrier()
    inbox = tl.multiple_of(own.to(tl.pointer_type(dtype)), 16) + slot
    for start in tl.range(program * BLOCK, numel, programs * BLOCK):
        at = start + lane
        # In rank order on every rank, so that all get the same bits.
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(RANKS):
            if rank == RANK:
                part = tl.load(x_ptr + at, mask=at < numel, other=0.0)
            else:
                # Past the first-level cache, which does not see what others write.
                source = inbox + rank * slot_numel + at
                part = tl.load(source, mask=at < numel, other=0.0, cache_modifier=".cg")
            total += part.to(tl.float32)
        tl.store(x_ptr + at, total.to(dtype), mask=at < numel)
    tl.store(calls_ptr + program, call + 1)


def one_shot_all_reduce(
    x: Tensor,
    peers: Tensor,
    calls: Tensor,
    rank: int,
    slot_bytes: int,
    block: int = 4096,
    num_warps: int = 16,
) -> Tensor:
    """Sum over the ranks in place; every rank must make the same calls in the same order.

    `peers` holds the addresses of the ranks' shared memory, which is two slots of
    `slot_bytes` for each rank, then zeroed int32 signals for each rank and program. `calls` are
    as many zeros as there are programs. At most `slot_bytes` are reduced, 16-byte aligned.
    """
    num_ranks = peers.numel()
    assert x.is_contiguous() and x.numel() * x.itemsize <= slot_bytes
    _one_shot_kernel[(calls.numel(),)](
        x,
        peers,
        calls,
        x.numel(),
        slot_bytes // x.itemsize,
        2 * num_ranks * slot_bytes,
        RANK=rank,
        RANKS=num_ranks,
        BLOCK=block,
        num_warps=num_warps,
    )
    return x


def shared_bytes(num_ranks: int, slot_bytes: int, num_programs: int) -> int:
    """Size of the shared memory of each rank."""
    return 2 * num_ranks * slot_bytes + 4 * num_ranks * num_programs


def new_calls(num_programs: int, device: torch.device) -> Tensor:
    """The counters of a rank that has made no call."""
    return torch.zeros(num_programs, dtype=torch.int32, device=device)
