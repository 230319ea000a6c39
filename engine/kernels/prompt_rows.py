# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202 (Triton gives its own meaning to annotations)
"""The inputs of a step with prompt chunks, laid out on the device from one upload.

Nothing about the launch depends on what the step holds, so a captured graph serves every step that
fits its number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256
HEADER_WORDS, CHUNK_WORDS = 3, 5


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Persistent inputs of a step with chunks: per row, per sequence and per sampled row."""

    ids: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    slot_mapping: Tensor  # int64 [rows]; -1 for padded rows
    seq_slots: Tensor  # int32 [sequences]: whose block table
    seq_starts: Tensor  # int32 [sequences]: first row
    seq_lens: Tensor  # int32 [sequences]: rows, 0 beyond the step's sequences
    seq_contexts: Tensor  # int32 [sequences]: keys, this step's included
    sampled_rows: Tensor  # int64 [sequences]; 0 beyond the step's samples

    @classmethod
    def new(cls, num_rows: int, num_seqs: int, device: torch.device) -> PromptRows:
        """Buffers for the largest step."""

        def zeros(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            ids=zeros(num_rows, torch.int64),
            positions=zeros(num_rows, torch.int64),
            slot_mapping=zeros(num_rows, torch.int64),
            seq_slots=zeros(num_seqs, torch.int32),
            seq_starts=zeros(num_seqs, torch.int32),
            seq_lens=zeros(num_seqs, torch.int32),
            seq_contexts=zeros(num_seqs, torch.int32),
            sampled_rows=zeros(num_seqs, torch.int64),
        )


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def _prompt_rows_kernel(
    words,
    row_slots,
    row_positions,
    block_tables,
    last_tokens,
    ids,
    positions,
    mapping,
    seq_slots,
    seq_starts,
    seq_lens,
    seq_contexts,
    sampled_rows,
    sample_slots,
    sample_positions,
    num_rows,
    num_seqs,
    num_slots,
    width,
    block_size,
    HEADER: tl.constexpr,
    PER_CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per sequence, decodes first; the last one takes what the step leaves empty."""
    seq = tl.program_id(0)
    num_decodes = tl.load(words).to(tl.int32)
    num_chunks = tl.load(words + 1).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    if seq == num_seqs:
        num_samples = tl.load(words + 2).to(tl.int32)
        last = words + HEADER + (num_chunks - 1) * PER_CHUNK
        used = (tl.load(last + 2) + tl.load(last + 3)).to(tl.int32)
        for start in tl.range(used, num_rows, BLOCK):
            at = start + lane
            mask = at < num_rows
            tl.store(ids + at, tl.zeros([BLOCK], tl.int64), mask=mask)
            tl.store(positions + at, tl.zeros([BLOCK], tl.int64), mask=mask)
            tl.store(mapping + at, tl.full([BLOCK], -1, tl.int64), mask=mask)
        for start in tl.range(num_samples, num_seqs, BLOCK):
            at = start + lane
            mask = at < num_seqs
            tl.store(sampled_rows + at, tl.zeros([BLOCK], tl.int64), mask=mask)
            tl.store(sample_slots + at, tl.zeros([BLOCK], tl.int64) + num_slots, mask=mask)
    elif seq < num_decodes:
        slot = tl.load(row_slots + seq)
        position = tl.load(row_positions + seq)
        block = tl.load(block_tables + slot * width + position // block_size).to(tl.int64)
        tl.store(ids + seq, tl.maximum(tl.load(last_tokens + slot), 0))
        tl.store(positions + seq, position)
        tl.store(mapping + seq, block * block_size + position % block_size)
        tl.store(row_positions + seq, position + 1)
        tl.store(seq_slots + seq, slot.to(tl.int32))
        tl.store(seq_starts + seq, seq)
        tl.store(seq_lens + seq, 1)
        tl.store(seq_contexts + seq, (position + 1).to(tl.int32))
        tl.store(sampled_rows + seq, seq.to(tl.int64))
        tl.store(sample_slots + seq, slot)
        tl.store(sample_positions + seq, position)
    elif seq < num_decodes + num_chunks:
        chunk = words + HEADER + (seq - num_decodes) * PER_CHUNK
        slot, first = tl.load(chunk), tl.load(chunk + 1)
        row, length = tl.load(chunk + 2), tl.load(chunk + 3)
        sample = tl.load(chunk + 4)
        source = words + HEADER + num_chunks * PER_CHUNK + row - num_decodes
        table = block_tables + slot * width
        for start in tl.range(0, length, BLOCK):
            at = start + lane
            mask = at < length
            position = first + at
            block = tl.load(table + position // block_size, mask=mask, other=0).to(tl.int64)
            tl.store(ids + row + at, tl.load(source + at, mask=mask), mask=mask)
            tl.store(positions + row + at, position, mask=mask)
            place = block * block_size + position % block_size
            tl.store(mapping + row + at, place, mask=mask)
        end = first + length
        tl.store(seq_slots + seq, slot.to(tl.int32))
        tl.store(seq_starts + seq, row.to(tl.int32))
        tl.store(seq_lens + seq, length.to(tl.int32))
        tl.store(seq_contexts + seq, end.to(tl.int32))
        if sample >= 0:
            tl.store(sampled_rows + sample, row + length - 1)
            tl.store(sample_slots + sample, slot)
            tl.store(sample_positions + sample, end - 1)
    else:
        tl.store(seq_slots + seq, 0)
        tl.store(seq_starts + seq, 0)
        tl.store(seq_lens + seq, 0)
        tl.store(seq_contexts + seq, 0)


def lay_out_prompt_rows(
    words: Tensor,
    row_slots: Tensor,
    row_positions: Tensor,
    block_tables: Tensor,
    last_tokens: Tensor,
    sample_slots: Tensor,
    sample_positions: Tensor,
    num_slots: int,
    block_size: int,
    rows: PromptRows,
    num_rows: int,
    num_seqs: int,
) -> None:
    """Fill the first `num_rows` rows and `num_seqs` sequences of `rows`, and mark what is sampled.

    `words` holds the numbers of decodes, chunks and samples; per chunk its slot, first position,
    first row, length and place among the samples (-1: none); then the chunks' token ids. Decode
    rows move on by one position.
    """
    _prompt_rows_kernel[(num_seqs + 1,)](
        words,
        row_slots,
        row_positions,
        block_tables,
        last_tokens,
        rows.ids,
        rows.positions,
        rows.slot_mapping,
        rows.seq_slots,
        rows.seq_starts,
        rows.seq_lens,
        rows.seq_contexts,
        rows.sampled_rows,
        sample_slots,
        sample_positions,
        num_rows,
        num_seqs,
        num_slots,
        block_tables.shape[1],
        block_size,
        HEADER=HEADER_WORDS,
        PER_CHUNK=CHUNK_WORDS,
        BLOCK=_BLOCK,
    )
