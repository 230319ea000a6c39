"""Device-side state of the running requests, updated by deltas.

Everything that a decode step reads lives here between steps: block tables, last tokens and
sampling parameters per *slot*, and which slot each row of the decode batch holds. One upload
carries all changes of a step. Slot `num_slots` is a spare that padded rows use.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from importlib.util import find_spec

import torch
from torch import Tensor

from engine.worker.command import SlotParams, StepCommand

_PARAM_WORDS = 6  # slot, temperature, top_k, top_p, min_p, seed
_PARAM = struct.Struct("<qdqddq")
_RING = 8


class Uploads:
    """Carries int64 words to the device through page-locked buffers.

    A buffer is used again only after `_RING` further uploads, when the step that read it is over:
    at most two steps are under way at a time and each makes at most four uploads.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._ring: list[Tensor] = [self._new(4096) for _ in range(_RING)] if self._pinned else []
        self._next = 0

    def send(self, parts: Iterable[array[int] | bytes]) -> Tensor:
        """One device tensor with the words of all parts, in order."""
        data = b"".join(
            bytes(part) if isinstance(part, bytes) else part.tobytes() for part in parts
        )
        words = torch.frombuffer(bytearray(data), dtype=torch.int64) if data else _NO_WORDS
        if not self._pinned:
            return words
        buffer = self._ring[self._next]
        if buffer.numel() < words.numel():
            buffer = self._ring[self._next] = self._new(2 * words.numel())
        self._next = (self._next + 1) % len(self._ring)
        staged = buffer[: words.numel()]
        staged.copy_(words)
        return staged.to(self._device, non_blocking=True)

    def _new(self, num_words: int) -> Tensor:
        return torch.empty(num_words, dtype=torch.int64, pin_memory=True)


_NO_WORDS = torch.empty(0, dtype=torch.int64)


class BatchState:
    """The persistent tensors, and the small kernels that keep them current."""

    def __init__(
        self, num_slots: int, max_rows: int, width: int, block_size: int, device: torch.device
    ) -> None:
        self.num_slots = num_slots
        self.max_rows = max_rows
        self.width = width
        self.block_size = block_size
        self.device = device
        slots = num_slots + 1
        self.block_tables = torch.zeros(slots, width, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(slots, dtype=torch.float32, device=device)
        self.top_ks = torch.zeros(slots, dtype=torch.int32, device=device)
        self.top_ps = torch.ones(slots, dtype=torch.float32, device=device)
        self.min_ps = torch.zeros(slots, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self.row_slots = torch.full((max_rows,), num_slots, dtype=torch.int64, device=device)
        self.row_positions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.sample_slots = torch.full((max_rows,), num_slots, dtype=torch.int64, device=device)
        self.sample_positions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.row_numbers = torch.arange(max_rows, dtype=torch.int64, device=device)
        self._uploads = Uploads(device)
        self._is_fused = device.type == "cuda" and find_spec("triton") is not None

    def apply(self, command: StepCommand) -> None:
        """Takes over what changed since the step before."""
        num_table, num_params = len(command.table_index), len(command.new_slots)
        rows = command.decode_slots
        if not num_table and not num_params and rows is None:
            return
        parts: list[array[int] | bytes] = [command.table_index, command.table_blocks]
        parts += [_PARAM.pack(*_param_words(params)) for params in command.new_slots]
        if rows is not None and command.decode_positions is not None:
            spare = self.max_rows - len(rows)
            parts += [rows, array("q", [self.num_slots]) * spare]
            parts += [command.decode_positions, array("q", [0]) * spare]
        words = self._uploads.send(parts)
        if num_table:
            blocks = words[num_table : 2 * num_table].to(torch.int32)
            self.block_tables.view(-1).index_copy_(0, words[:num_table], blocks)
        start = 2 * num_table
        if num_params:
            self._take_params(words[start : start + _PARAM_WORDS * num_params])
            start += _PARAM_WORDS * num_params
        if rows is not None:
            self.row_slots.copy_(words[start : start + self.max_rows])
            self.row_positions.copy_(words[start + self.max_rows :])

    def _take_params(self, words: Tensor) -> None:
        columns = words.view(-1, _PARAM_WORDS)
        reals = words.view(torch.float64).view(-1, _PARAM_WORDS)
        slots = columns[:, 0]
        self.temperatures.index_copy_(0, slots, reals[:, 1].float())
        self.top_ks.index_copy_(0, slots, columns[:, 2].int())
        self.top_ps.index_copy_(0, slots, reals[:, 3].float())
        self.min_ps.index_copy_(0, slots, reals[:, 4].float())
        self.seeds.index_copy_(0, slots, columns[:, 5])

    def upload(self, parts: Iterable[array[int] | bytes]) -> Tensor:
        """Further words of this step (a mixed step's tokens)."""
        return self._uploads.send(parts)

    def decode_rows(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Inputs of the first `num_rows` decode rows, all computed on the device.

        Returns token ids, positions, slot mapping, block tables and context lengths, notes which
        rows will be sampled and moves every row on by one position. Padded rows get slot -1 and
        context 0, so they write nothing and attend to nothing.
        """
        if self._is_fused and num_rows:
            from engine.kernels.decode_rows import fused_decode_rows

            return fused_decode_rows(
                self.row_slots[:num_rows],
                self.row_positions,
                self.block_tables,
                self.last_tokens,
                self.sample_slots,
                self.sample_positions,
                self.num_slots,
                self.block_size,
            )
        return self._decode_rows(num_rows)

    def _decode_rows(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The reference of the fused kernel."""
        slots, positions = self.row_slots[:num_rows], self.row_positions[:num_rows]
        valid = slots < self.num_slots
        tables = self.block_tables.index_select(0, slots)
        mapping = torch.where(valid, self._kv_slots(tables, positions), -1)
        context_lens = torch.where(valid, positions + 1, 0).to(torch.int32)
        token_ids = self.last_tokens.index_select(0, slots).clamp_(min=0)  # -1: none was drawn
        now = positions.clone()
        self.sample_slots[:num_rows].copy_(slots)
        self.sample_positions[:num_rows].copy_(positions)
        self.row_positions[:num_rows] += valid
        return token_ids, now, mapping, tables, context_lens

    def _kv_slots(self, tables: Tensor, positions: Tensor) -> Tensor:
        column = torch.div(positions, self.block_size, rounding_mode="floor").unsqueeze(1)
        blocks = tables.gather(1, column).squeeze(1).to(torch.int64)
        return blocks * self.block_size + positions % self.block_size

    def chunk_kv_slots(self, token_slots: Tensor, positions: Tensor) -> Tensor:
        """Slot mapping of chunk tokens, given the batch slot of each."""
        index = token_slots * self.width + torch.div(
            positions, self.block_size, rounding_mode="floor"
        )
        blocks = self.block_tables.view(-1).index_select(0, index).to(torch.int64)
        return blocks * self.block_size + positions % self.block_size

    def mark_sampled(self, start: int, slots: Tensor, positions: Tensor) -> None:
        """Puts chunks that sample behind the decode rows; rows further back hold no request."""
        end = start + slots.numel()
        self.sample_slots[start:end].copy_(slots)
        self.sample_positions[start:end].copy_(positions)
        self.sample_slots[end:].fill_(self.num_slots)

    def keep_sampled(self, num_rows: int, token_ids: Tensor) -> None:
        """Makes the sampled ids the next inputs of their slots."""
        self.last_tokens.index_copy_(0, self.sample_slots[:num_rows], token_ids)


def _param_words(params: SlotParams) -> tuple[int, float, int, float, float, int]:
    return (
        params.slot,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.seed,
    )
