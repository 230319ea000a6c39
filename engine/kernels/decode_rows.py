# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202 (Triton gives its own meaning to annotations)
"""The inputs of the decode rows in one kernel, where plain torch needs some fifteen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TABLE_CHUNK = 256


@triton.jit
def _decode_rows_kernel(
    row_slots,
    row_positions,
    block_tables,
    last_tokens,
    ids,
    positions,
    mapping,
    tables,
    context_lens,
    sample_slots,
    sample_positions,
    num_slots,
    width,
    block_size,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots + row)
    position = tl.load(row_positions + row)
    valid = slot < num_slots
    table = block_tables + slot * width
    for start in range(0, width, CHUNK):
        column = start + tl.arange(0, CHUNK)
        live = column < width
        entry = tl.load(table + column, mask=live)
        tl.store(tables + row * width + column, entry, mask=live)
    block = tl.load(table + position // block_size).to(tl.int64)
    kv_slot = block * block_size + position % block_size
    tl.store(mapping + row, tl.where(valid, kv_slot, -1))
    tl.store(context_lens + row, tl.where(valid, position + 1, 0).to(tl.int32))
    tl.store(ids + row, tl.maximum(tl.load(last_tokens + slot), 0))  # -1: no token was drawn
    tl.store(positions + row, position)
    tl.store(sample_slots + row, slot)
    tl.store(sample_positions + row, position)
    tl.store(row_positions + row, position + valid.to(tl.int64))


def fused_decode_rows(
    row_slots: Tensor,
    row_positions: Tensor,
    block_tables: Tensor,
    last_tokens: Tensor,
    sample_slots: Tensor,
    sample_positions: Tensor,
    num_slots: int,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `BatchState.decode_rows`; the rows are those of `row_slots`."""
    num_rows, width = row_slots.numel(), block_tables.shape[1]
    ids, positions, mapping = (torch.empty_like(row_slots) for _ in range(3))
    tables = torch.empty(num_rows, width, dtype=torch.int32, device=row_slots.device)
    context_lens = torch.empty(num_rows, dtype=torch.int32, device=row_slots.device)
    _decode_rows_kernel[(num_rows,)](
        row_slots,
        row_positions,
        block_tables,
        last_tokens,
        ids,
        positions,
        mapping,
        tables,
        context_lens,
        sample_slots,
        sample_positions,
        num_slots,
        width,
        block_size,
        CHUNK=_TABLE_CHUNK,
        num_warps=2,
    )
    return ids, positions, mapping, tables, context_lens
