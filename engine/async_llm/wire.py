"""Messages between the front end's process and the engine's, and their framing on a socket."""

from __future__ import annotations

import select
import socket
import struct
from array import array
from collections.abc import Sequence

import msgspec

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 16


class Add(msgspec.Struct, tag="add", array_like=True):
    """A request that was checked; `number` is its name between the processes."""

    number: int
    prompt_token_ids: bytes  # int64
    arrival_ns: int
    params: dict[str, object]
    priority: int


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """Requests nobody waits for any more."""

    numbers: list[int]


class Close(msgspec.Struct, tag="close", array_like=True):
    """End the process."""


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The engine has started: what the front end must know of it."""

    kernel: dict[str, object]
    vocab_size: int
    eos_token_ids: list[int]
    length_cause: str
    facts: dict[str, str]


class StartFailed(msgspec.Struct, tag="start_failed", array_like=True):
    """The engine could not start; `error` is the pickled exception."""

    error: bytes


class Dead(msgspec.Struct, tag="dead", array_like=True):
    """The engine can take no more steps."""

    cause: str


# Token id, log probability and rank.
WirePlace = list[tuple[int, float, int]]


class Begin(msgspec.Struct, array_like=True):
    """What the first token of a request comes with."""

    number: int
    scheduled_ns: int
    num_cached_tokens: int
    prompt_logprobs: list[WirePlace | None] | None


class End(msgspec.Struct, array_like=True):
    """A request that ended."""

    number: int
    reason: str
    stop_reason: int | None
    num_preemptions: int
    error: str | None


class Stats(msgspec.Struct, array_like=True):
    """The state after a step, and what it added: the fields of `StepStats` in their order."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_step_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int
    num_preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int


class Outputs(msgspec.Struct, tag="outputs", array_like=True):
    """What a step gave: columns of requests and their tokens, beginnings and ends.

    `logprobs` is None, or has one entry per row, None for rows without.
    """

    time_ns: int
    numbers: list[int]
    token_ids: list[int]
    logprobs: list[WirePlace | None] | None
    begins: list[Begin]
    ends: list[End]
    stats: Stats | None


ToEngine = Add | Abort | Close
FromEngine = Ready | StartFailed | Dead | Outputs


class FrameReader:
    """Cuts a stream of bytes into messages."""

    def __init__(self, kinds: object) -> None:
        self._buffer = bytearray()
        self._decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(kinds)

    def feed(self, data: bytes) -> list[object]:
        """The messages that are whole now."""
        buffer = self._buffer
        buffer += data
        found: list[object] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            with memoryview(buffer) as view:
                found.append(self._decoder.decode(view[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return found


def frame(message: ToEngine | FromEngine) -> bytes:
    """A message with its length before it."""
    content = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(content)) + content


class EngineEnd:
    """The engine's end of the socket: sending never waits for a front end that is busy."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.setblocking(True)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._reader = FrameReader(ToEngine)
        self._unsent = bytearray()
        self.is_open = True

    def receive(self, timeout_s: float | None) -> list[object]:
        """All messages that have come; waits for the first one where a time is given."""
        found: list[object] = []
        if timeout_s is not None:
            self._flush()
            if not self._poll.poll(timeout_s * 1e3):
                return found
        while self.is_open:
            try:
                data = self._sock.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            if not data:
                self.is_open = False
                break
            found += self._reader.feed(data)
            if len(data) < _READ_BYTES:
                break
        return found

    def send(self, message: FromEngine) -> None:
        """Sends what the socket takes now, and keeps the rest for the next call."""
        self._unsent += frame(message)
        try:
            sent = self._sock.send(self._unsent, socket.MSG_DONTWAIT)
            del self._unsent[:sent]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.is_open = False

    def _flush(self) -> None:
        """Sends everything, however long the front end takes: there is nothing else to do."""
        try:
            self._sock.sendall(self._unsent)
        except OSError:
            self.is_open = False
        self._unsent.clear()

    def close(self) -> None:
        """Sends what is left and closes the socket."""
        if self.is_open:
            self._flush()
        self._sock.close()


def ids_to_bytes(token_ids: Sequence[int]) -> bytes:
    """Ids as int64 of this machine."""
    return array("q", token_ids).tobytes()


def ids_from_bytes(data: bytes) -> array[int]:
    """Inverse of `ids_to_bytes`."""
    return array("q", data)
