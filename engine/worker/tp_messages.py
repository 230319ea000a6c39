"""Wire format between the engine and its worker processes.

Commands and results are packed by hand: a steady decode step takes some fifty bytes, a prompt
eight bytes a token, and no message has a size limit.
"""

from __future__ import annotations

import json
import struct
from array import array

from engine.requests.committed_step import StepLogprobs
from engine.worker.command import (
    BannedTokens,
    ChunkCommand,
    SlotParams,
    StepCommand,
    StepResult,
)

_HEAD = struct.Struct("<qiiiiiiii")
_SLOT = struct.Struct("<ididdq")
_CHUNK = struct.Struct("<iqi?i")
_BANNED = struct.Struct("<ii")
_NO_LOGPROBS = -1


def encode_command(command: StepCommand) -> bytes:
    """The bytes of a command; ids and positions are little-endian 64-bit integers."""
    num_rows = -1 if command.decode_slots is None else len(command.decode_slots)
    logprobs = _NO_LOGPROBS if command.num_logprobs is None else command.num_logprobs
    parts = [
        _HEAD.pack(
            command.step,
            command.num_decodes,
            num_rows,
            len(command.table_index),
            len(command.new_slots),
            len(command.chunks),
            len(command.banned),
            logprobs * 2 + command.needs_filters,
            _NO_LOGPROBS if command.num_prompt_logprobs is None else command.num_prompt_logprobs,
        )
    ]
    if command.decode_slots is not None and command.decode_positions is not None:
        parts += [command.decode_slots.tobytes(), command.decode_positions.tobytes()]
    parts += [command.table_index.tobytes(), command.table_blocks.tobytes()]
    for p in command.new_slots:
        parts.append(_SLOT.pack(p.slot, p.temperature, p.top_k, p.top_p, p.min_p, p.seed))
    for chunk in command.chunks:
        length = len(chunk.token_ids)
        targets = chunk.prompt_targets
        numbers = (chunk.slot, chunk.first_position, length, chunk.samples, len(targets))
        parts += [_CHUNK.pack(*numbers), chunk.token_ids.tobytes(), targets.tobytes()]
    for ban in command.banned:
        parts.append(_BANNED.pack(ban.row, len(ban.token_ids)))
        parts.append(ban.token_ids.tobytes())
    return b"".join(parts)


def decode_command(message: bytes) -> StepCommand:
    """The command that `encode_command` wrote."""
    reader = _Reader(message)
    head = reader.unpack(_HEAD)
    step, num_decodes, num_rows, num_table, num_slots, num_chunks, num_banned = head[:7]
    flags, prompt_logprobs = head[7:]
    decode_slots = reader.ids(num_rows) if num_rows >= 0 else None
    decode_positions = reader.ids(num_rows) if num_rows >= 0 else None
    table_index, table_blocks = reader.ids(num_table), reader.ids(num_table)
    new_slots = tuple(SlotParams(*reader.unpack(_SLOT)) for _ in range(num_slots))
    chunks = []
    for _ in range(num_chunks):
        slot, first_position, length, samples, num_targets = reader.unpack(_CHUNK)
        ids, targets = reader.ids(length), reader.ids(num_targets)
        chunks.append(ChunkCommand(slot, first_position, ids, samples, targets))
    banned = []
    for _ in range(num_banned):
        row, length = reader.unpack(_BANNED)
        banned.append(BannedTokens(row, reader.ids(length)))
    logprobs = flags >> 1
    return StepCommand(
        step=step,
        num_decodes=num_decodes,
        decode_slots=decode_slots,
        decode_positions=decode_positions,
        table_index=table_index,
        table_blocks=table_blocks,
        new_slots=new_slots,
        chunks=tuple(chunks),
        needs_filters=bool(flags & 1),
        num_logprobs=None if logprobs == _NO_LOGPROBS else logprobs,
        banned=tuple(banned),
        num_prompt_logprobs=None if prompt_logprobs == _NO_LOGPROBS else prompt_logprobs,
    )


_RESULT = struct.Struct("<qii")
_NO_TIME = -1


def encode_result(result: StepResult) -> bytes:
    """The bytes of a result."""
    details = b""
    if result.logprobs is not None or result.prompt_logprobs is not None:
        both = [_columns(result.logprobs), _columns(result.prompt_logprobs)]
        details = json.dumps(both).encode()
    time_ns = _NO_TIME if result.device_time_ns is None else result.device_time_ns
    head = _RESULT.pack(time_ns, len(result.token_ids), len(details))
    return head + result.token_ids.tobytes() + details


def decode_result(message: bytes) -> StepResult:
    """The result that `encode_result` wrote."""
    reader = _Reader(message)
    time_ns, num_tokens, num_details = reader.unpack(_RESULT)
    token_ids = reader.ids(num_tokens)
    both = [None, None]
    if num_details:
        both = json.loads(message[len(message) - num_details :])
    logprobs, prompt = (None if columns is None else StepLogprobs(*columns) for columns in both)
    return StepResult(token_ids, None if time_ns == _NO_TIME else time_ns, logprobs, prompt)


def _columns(logprobs: StepLogprobs | None) -> list[object] | None:
    if logprobs is None:
        return None
    return [logprobs.sampled, logprobs.ranks, logprobs.top_ids, logprobs.top_logprobs]


class _Reader:
    """Cursor over a message."""

    def __init__(self, message: bytes) -> None:
        self._view = memoryview(message)
        self._at = 0

    def unpack(self, form: struct.Struct) -> tuple:  # type: ignore[type-arg]
        values = form.unpack_from(self._view, self._at)
        self._at += form.size
        return values

    def ids(self, length: int) -> array[int]:
        ids = array("q")
        ids.frombytes(self._view[self._at : self._at + 8 * length])
        self._at += 8 * length
        return ids
