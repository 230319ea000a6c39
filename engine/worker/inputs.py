"""Inputs of a step that holds prompt chunks: decode rows first, then the chunks' tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.attention.base import AttentionMetadata
from engine.worker.batch_state import BatchState
from engine.worker.command import ChunkCommand, StepCommand


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model needs for one step, and which of its rows are sampled."""

    input_ids: Tensor
    positions: Tensor
    meta: AttentionMetadata
    sampled_rows: Tensor  # int64 [num_samples]


def mixed_step_inputs(command: StepCommand, state: BatchState, max_context: int) -> StepInputs:
    """Inputs of a step with chunks; `state` must have taken over the command.

    Marks the rows to sample in `state`, decodes first.
    """
    num_decodes, chunks = command.num_decodes, command.chunks
    ids, positions, mapping, tables, context_lens = state.decode_rows(num_decodes)
    lengths = [len(chunk.token_ids) for chunk in chunks]
    words = state.upload(_chunk_words(chunks, lengths, num_decodes))
    columns = _Columns(words)
    total = sum(lengths)
    chunk_ids, chunk_positions = columns.take(total), columns.take(total)
    token_slots = columns.take(total)
    slots = columns.take(len(chunks))
    contexts = columns.take(len(chunks)).to(torch.int32)
    bounds = columns.take(len(chunks) + 1).to(torch.int32)
    num_sampling = command.num_samples - num_decodes
    rows = columns.take(num_sampling)
    sample_slots, sample_positions = columns.take(num_sampling), columns.take(num_sampling)
    state.mark_sampled(num_decodes, sample_slots, sample_positions)
    meta = AttentionMetadata(
        slot_mapping=torch.cat([mapping, state.chunk_kv_slots(token_slots, chunk_positions)]),
        num_decodes=num_decodes,
        decode_block_tables=tables,
        decode_context_lens=context_lens,
        max_decode_context=max_context,
        cu_seqlens_q=bounds,
        chunk_block_tables=state.block_tables.index_select(0, slots),
        chunk_context_lens=contexts,
        max_seqlen_q=max(lengths),
        max_seqlen_k=max(
            chunk.first_position + length for chunk, length in zip(chunks, lengths, strict=True)
        ),
    )
    return StepInputs(
        input_ids=torch.cat([ids, chunk_ids]),
        positions=torch.cat([positions, chunk_positions]),
        meta=meta,
        sampled_rows=torch.cat([state.row_numbers[:num_decodes], rows]),
    )


def _chunk_words(
    chunks: Sequence[ChunkCommand], lengths: Sequence[int], num_decodes: int
) -> list[array[int]]:
    """All columns of the chunks, in the order in which `mixed_step_inputs` takes them."""
    ids, positions, token_slots = array("q"), array("q"), array("q")
    rows, sample_slots, sample_positions = array("q"), array("q"), array("q")
    contexts = array("q")
    for chunk, length in zip(chunks, lengths, strict=True):
        end = chunk.first_position + length
        ids.extend(chunk.token_ids)
        positions.extend(range(chunk.first_position, end))
        token_slots.extend(array("q", [chunk.slot]) * length)
        contexts.append(end)
        if chunk.samples:
            rows.append(num_decodes + len(ids) - 1)
            sample_slots.append(chunk.slot)
            sample_positions.append(end - 1)
    slots = array("q", [chunk.slot for chunk in chunks])
    bounds = array("q", accumulate(lengths, initial=0))
    columns = [ids, positions, token_slots, slots, contexts, bounds]
    return [*columns, rows, sample_slots, sample_positions]


class _Columns:
    """Takes consecutive columns off one uploaded tensor."""

    def __init__(self, words: Tensor) -> None:
        self._words = words
        self._at = 0

    def take(self, length: int) -> Tensor:
        start = self._at
        self._at += length
        return self._words[start : self._at]
