"""The fused kernel of the decode rows does what its torch reference does."""

from __future__ import annotations

import pytest
import torch
from kernel_testing import KERNEL_DEVICE

from engine.kernels.decode_rows import fused_decode_rows
from engine.worker.batch_state import BatchState


@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("width", [1, 17, 300])
def test_fused_rows_equal_the_reference(block_size, width):
    torch.manual_seed(block_size + width)
    device = torch.device(KERNEL_DEVICE)
    num_slots, num_rows = 9, 7
    states = []
    for _ in range(2):
        state = BatchState(num_slots, num_rows, width, block_size, device)
        states.append(state)
    fused, reference = states
    tables = torch.randint(0, 1000, (num_slots + 1, width), dtype=torch.int32)
    tokens = torch.randint(0, 2**40, (num_slots + 1,))
    slots = torch.tensor([3, 0, 8, 5, num_slots, num_slots, 1])
    positions = torch.randint(0, width * block_size, (num_rows,))
    positions[4:6] = 0
    for state in states:
        state.block_tables.copy_(tables)
        state.last_tokens.copy_(tokens)
        state.row_slots.copy_(slots)
        state.row_positions.copy_(positions)
    for rows in (num_rows, 3):
        found = fused_decode_rows(
            fused.row_slots[:rows],
            fused.row_positions,
            fused.block_tables,
            fused.last_tokens,
            fused.sample_slots,
            fused.sample_positions,
            num_slots,
            block_size,
        )
        wanted = reference._decode_rows(rows)
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
        for name in ("row_positions", "sample_slots", "sample_positions"):
            assert torch.equal(getattr(fused, name), getattr(reference, name)), name
        for state in states:  # stay inside the tables
            state.row_positions.copy_(positions)
