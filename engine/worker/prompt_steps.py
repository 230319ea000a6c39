"""Steps with prompt chunks at padded sizes: all that the device needs comes in one upload.

What a step holds (which sequences, how long, behind which prefix) is read on the device, so one
captured graph per number of rows serves every step that fits. Larger steps, other backends and
tensor parallelism take the unpadded path of `engine.worker.inputs`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.base import AttentionMetadata
from engine.kernels.prompt_rows import CHUNK_WORDS, HEADER_WORDS, PromptRows, lay_out_prompt_rows
from engine.kernels.worklist import Worklist, WorklistSizes, fill_worklist
from engine.layers.fp8 import FP8
from engine.options import EngineOptions
from engine.worker.batch_state import BatchState
from engine.worker.command import StepCommand
from engine.worker.graphs import prompt_graph_sizes
from engine.worker.startup import LoadedModel


@dataclass(frozen=True, slots=True)
class PromptInputs:
    """Arguments of the model for one padded step."""

    input_ids: Tensor
    positions: Tensor
    meta: AttentionMetadata


class PromptSteps:
    """The persistent buffers of padded steps."""

    def __init__(
        self, sizes: tuple[int, ...], state: BatchState, cut: WorklistSizes, out: Tensor
    ) -> None:
        """`out` is room for the attention's output of the largest step."""
        self.sizes = sizes
        self._state = state
        self._cut = cut
        self._num_seqs = state.max_rows
        self._rows = PromptRows.new(sizes[-1], self._num_seqs, state.device)
        self._work = Worklist.new(state.block_tables, out, self._num_seqs, cut)
        num_words = HEADER_WORDS + CHUNK_WORDS * self._num_seqs + sizes[-1]
        self._words = torch.zeros(num_words, dtype=torch.int64, device=state.device)
        self.clear()

    @property
    def sampled_rows(self) -> Tensor:
        """Rows whose next tokens are drawn, one per place among the samples."""
        return self._rows.sampled_rows

    def bucket(self, command: StepCommand) -> int | None:
        """The padded number of rows of a step; None if it is too large."""
        total = command.num_decodes + sum(len(chunk.token_ids) for chunk in command.chunks)
        index = bisect_left(self.sizes, total)
        return self.sizes[index] if index < len(self.sizes) else None

    def take(self, command: StepCommand) -> None:
        """Uploads what the step holds; `BatchState` must have taken over the command."""
        words = prompt_words(command)
        num_words = sum(map(len, words))
        self._words[:num_words].copy_(self._state.upload(words))

    def clear(self) -> None:
        """An empty step, for captures: one chunk without rows."""
        self._words.zero_()
        self._words[1] = 1
        self._words[HEADER_WORDS + CHUNK_WORDS - 1] = -1

    def lay_out(self, num_rows: int, num_decodes: int = 0) -> PromptInputs:
        """Inputs of `num_rows` padded rows, worked out on the device.

        `num_decodes` is for those who read the metadata, and may be left out.
        """
        state, rows = self._state, self._rows
        num_seqs = min(num_rows, self._num_seqs)
        lay_out_prompt_rows(
            self._words,
            state.row_slots,
            state.row_positions,
            state.block_tables,
            state.last_tokens,
            state.sample_slots,
            state.sample_positions,
            state.num_slots,
            state.block_size,
            rows,
            num_rows,
            self._num_seqs,
        )
        fill_worklist(
            self._work,
            self._cut,
            rows.seq_slots,
            rows.seq_starts,
            rows.seq_lens,
            rows.seq_contexts,
            num_seqs,
        )
        meta = AttentionMetadata(
            slot_mapping=rows.slot_mapping[:num_rows],
            num_decodes=num_decodes,
            decode_block_tables=state.block_tables,
            decode_context_lens=rows.seq_contexts,
            max_decode_context=0,
            work=self._work,
        )
        return PromptInputs(rows.ids[:num_rows], rows.positions[:num_rows], meta)


def make_prompt_steps(
    options: EngineOptions,
    loaded: LoadedModel,
    state: BatchState,
    kv_cache: Tensor,
) -> PromptSteps | None:
    """The padded steps; None where the cache has another dtype than the kernels expect."""
    if kv_cache.dtype not in (loaded.dtype, FP8):
        return None
    from engine.kernels.ragged import ragged_sizes

    config, device = loaded.config, state.device
    sizes = prompt_graph_sizes(options.max_num_batched_tokens, loaded.model.num_layer_weights)
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    cut = ragged_sizes(*heads, loaded.dtype, device)
    shape = (sizes[-1], config.num_heads, config.head_dim)
    out = torch.empty(shape, dtype=loaded.dtype, device=device)
    return PromptSteps(sizes, state, cut, out)


def prompt_words(command: StepCommand) -> Sequence[array[int]]:
    """The upload of a step, as `lay_out_prompt_rows` reads it."""
    num_decodes, chunks = command.num_decodes, command.chunks
    words = array("q", (num_decodes, len(chunks), command.num_samples))
    row, sample = num_decodes, num_decodes
    for chunk in chunks:
        length = len(chunk.token_ids)
        words.extend((chunk.slot, chunk.first_position, row, length))
        words.append(sample if chunk.samples else -1)
        row += length
        sample += chunk.samples
    return [words, *(chunk.token_ids for chunk in chunks)]
