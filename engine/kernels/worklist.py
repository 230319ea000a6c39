# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202 (Triton gives its own meaning to annotations)
"""Cutting a ragged batch into pieces of attention of about equal size, on the device.

A *tile* is a run of one sequence's queries, an *item* a tile and a part of the keys that it sees.
All parts of a step are of one length, chosen so that about `target` items come out: a step with a
lone long context is cut finely, a full batch hardly at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.sizes import cdiv, next_power_of_2

ITEM_WORDS = 8
_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Worklist:
    """The items of one step, for `ragged_attention`.

    An item is: slot, first row, rows (0: nothing to do), position of the first row, number of its
    part, last key + 1, parts of the tile, and the tile's first place among the partial results.
    """

    items: Tensor  # int32 [most items, ITEM_WORDS]
    count: Tensor  # int32 [2]: items, and keys in a part
    arrived: Tensor  # int32 [most partial results * KV heads], zero between launches
    block_tables: Tensor  # int32 [slots, max_blocks]
    out: Tensor  # [rows, Hq, D], finite everywhere
    rows_per_tile: int
    most_partial: int

    @classmethod
    def new(
        cls, block_tables: Tensor, out: Tensor, num_seqs: int, sizes: WorklistSizes
    ) -> Worklist:
        """Room for any step of as many rows as `out` has, which starts as zeros."""
        device = block_tables.device
        most = sizes.target + num_seqs + cdiv(out.shape[0], sizes.rows_per_tile)
        most_partial = 2 * sizes.target
        return cls(
            items=torch.zeros(most, ITEM_WORDS, dtype=torch.int32, device=device),
            count=torch.zeros(2, dtype=torch.int32, device=device),
            arrived=torch.zeros(
                most_partial * sizes.num_kv_heads, dtype=torch.int32, device=device
            ),
            block_tables=block_tables,
            out=out.zero_(),
            rows_per_tile=sizes.rows_per_tile,
            most_partial=most_partial,
        )


@dataclass(frozen=True, slots=True)
class WorklistSizes:
    """How a model's attention is cut."""

    num_kv_heads: int
    rows_per_tile: int
    target: int  # items that fill the device
    key_multiple: int  # keys per iteration of the attention kernel
    min_part: int  # keys; shorter parts cost more to join than they save


@triton.jit(do_not_specialize=["num_seqs"])
def _worklist_kernel(
    slots_ptr,
    starts_ptr,
    lens_ptr,
    contexts_ptr,
    items_ptr,
    count_ptr,
    num_seqs,
    ROWS: tl.constexpr,
    TARGET: tl.constexpr,
    MULTIPLE: tl.constexpr,
    MIN_PART: tl.constexpr,
    SEQS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program writes the items of one sequence; each of them sums up all sequences."""
    seq = tl.program_id(0)
    every = tl.arange(0, SEQS)
    lens = tl.load(lens_ptr + every, mask=every < num_seqs, other=0)
    contexts = tl.load(contexts_ptr + every, mask=every < num_seqs, other=0)
    tiles = tl.cdiv(lens, ROWS)
    keys = tl.sum(tiles * contexts, axis=0)
    part = tl.maximum(tl.cdiv(keys, TARGET), MIN_PART)
    part = tl.cdiv(part, MULTIPLE) * MULTIPLE
    parts = tl.cdiv(contexts, part)
    counts = tiles * parts
    split_counts = tl.where(parts > 1, counts, 0)
    before = tl.sum(tl.where(every < seq, counts, 0), axis=0)
    split_before = tl.sum(tl.where(every < seq, split_counts, 0), axis=0)
    if seq == 0:
        tl.store(count_ptr, tl.sum(counts, axis=0))
        tl.store(count_ptr + 1, part)
    length, context = tl.load(lens_ptr + seq), tl.load(contexts_ptr + seq)
    slot, start = tl.load(slots_ptr + seq), tl.load(starts_ptr + seq)
    my_tiles = tl.cdiv(length, ROWS)
    my_parts = tl.cdiv(context, part)
    for first in tl.range(0, my_tiles * my_parts, BLOCK):
        index = first + tl.arange(0, BLOCK)
        mask = index < my_tiles * my_parts
        # Late tiles see the most keys and are started first.
        tile = my_tiles - 1 - index // my_parts
        number = index % my_parts
        rows = tl.minimum(ROWS, length - tile * ROWS)
        position = context - length + tile * ROWS
        seen = position + rows
        tile_parts = tl.cdiv(seen, part)
        at = items_ptr + (before + index) * WORDS
        tl.store(at, tl.zeros([BLOCK], tl.int32) + slot, mask=mask)
        tl.store(at + 1, start + tile * ROWS, mask=mask)
        tl.store(at + 2, tl.where(number < tile_parts, rows, 0), mask=mask)
        tl.store(at + 3, position, mask=mask)
        tl.store(at + 4, number, mask=mask)
        tl.store(at + 5, tl.minimum(seen, (number + 1) * part), mask=mask)
        tl.store(at + 6, tile_parts, mask=mask)
        tl.store(at + 7, tl.where(my_parts > 1, split_before + index - number, 0), mask=mask)


def fill_worklist(
    work: Worklist,
    sizes: WorklistSizes,
    seq_slots: Tensor,
    seq_starts: Tensor,
    seq_lens: Tensor,
    seq_contexts: Tensor,
    num_seqs: int,
) -> None:
    """Write the items of the first `num_seqs` sequences (int32 columns; length 0: none)."""
    _worklist_kernel[(num_seqs,)](
        seq_slots,
        seq_starts,
        seq_lens,
        seq_contexts,
        work.items,
        work.count,
        num_seqs,
        ROWS=sizes.rows_per_tile,
        TARGET=sizes.target,
        MULTIPLE=sizes.key_multiple,
        MIN_PART=sizes.min_part,
        SEQS=next_power_of_2(seq_lens.numel()),
        WORDS=ITEM_WORDS,
        BLOCK=_BLOCK,
    )
