"""The file that a recording vLLM writes: one JSON list a line, after a line with the configuration.

All times are integer microseconds of the machine's monotonic clock since the file was opened;
requests and block hashes are numbered in the order in which they were first seen.

    ["a", time, request, prompt tokens, max tokens, sent at, blocks of the prompt, priority]
    ["s", start, end, [[request, tokens], ...], [[request, hit tokens], ...], [preempted, ...],
          running, waiting, free blocks]
    ["d", start, end, running, waiting, free blocks]        as the step before, one token each
    ["u", start, end, step, [[request, reason, output tokens, its blocks], ...]]
    ["x", time, [as in "u", ...]]                          given up by their clients
    ["c", request, sent at, first token at, [gaps between tokens, ...]]
                                                           as its client saw it: `log join` adds it
    ["e", time]                                            the end: the server was shut down
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence

FORMAT_NAME = "lockstep-vllm-log"
FORMAT_VERSION = 1
_FLUSH_NS = 1_000_000_000

# A request that ended: its id, the reason, output tokens, and the hashes of its blocks.
Ended = tuple[str, str, int, Sequence[object]]


class RunLogWriter:
    """Writes one log; every call is a few microseconds per request of the step."""

    def __init__(self, path: str | os.PathLike[str], config: Mapping[str, object]) -> None:
        self._file = open(path, "w", encoding="utf-8", buffering=1 << 16)  # noqa: SIM115
        self._zero_ns = self._flushed_ns = time.monotonic_ns()
        self._wall_zero = time.time()
        self._requests: dict[str, int] = {}
        self._blocks: dict[object, int] = {}
        self._num_requests = self._num_steps = 0
        self._rows: list[str] = []  # of the step before, if it gave each one token
        header = {"format": FORMAT_NAME, "version": FORMAT_VERSION, "config": dict(config)}
        header["monotonic_us"] = self._zero_ns // 1000
        self._file.write(json.dumps(header) + "\n")
        self._file.flush()

    def added(
        self,
        name: str,
        prompt_tokens: int,
        max_tokens: int,
        sent_at: float,
        hashes: Sequence[object],
        priority: int,
    ) -> None:
        """A request reached the scheduler; `sent_at` is wall-clock time."""
        self._requests[name] = self._num_requests
        self._num_requests += 1
        sent_us = round((sent_at - self._wall_zero) * 1e6)
        row = ["a", self._now_us(), self._requests[name], prompt_tokens, max_tokens, sent_us]
        self._line([*row, self._numbered(hashes), priority])

    def scheduled(
        self,
        start_ns: int,
        end_ns: int,
        entries: Mapping[str, int],
        admitted: Mapping[str, int],
        preempted: Sequence[str],
        queues: tuple[int, int],
        num_free_blocks: int,
    ) -> int:
        """A step that computes something was scheduled; its number."""
        rows = list(entries)
        times, counts = [self._us(start_ns), self._us(end_ns)], [*queues, num_free_blocks]
        if rows and rows == self._rows and len(rows) == sum(entries.values()):
            self._line(["d", *times, *counts])
        else:
            numbers = self._requests
            pairs = [[numbers[name], count] for name, count in entries.items()]
            hits = [[numbers[name], count] for name, count in admitted.items()]
            self._line(["s", *times, pairs, hits, [numbers[name] for name in preempted], *counts])
            self._rows = rows if len(rows) == sum(entries.values()) else []
        self._num_steps += 1
        return self._num_steps - 1

    def updated(self, step: int, start_ns: int, end_ns: int, ended: Iterable[Ended]) -> None:
        """The result of a step was booked."""
        gone = [self._ended(*request) for request in ended]
        self._line(["u", self._us(start_ns), self._us(end_ns), step, gone])

    def aborted(self, ended: Iterable[Ended]) -> None:
        """Requests ended from outside."""
        self._line(["x", self._now_us(), [self._ended(*request) for request in ended]])

    def close(self) -> None:
        """Completes the file; a second call does nothing."""
        if not self._file.closed:
            self._line(["e", self._now_us()])
            self._file.close()

    def _ended(
        self, name: str, reason: str, outputs: int, hashes: Sequence[object]
    ) -> list[object]:
        return [self._requests.pop(name), reason, outputs, self._numbered(hashes)]

    def _numbered(self, hashes: Sequence[object]) -> list[int]:
        blocks = self._blocks
        return [blocks.setdefault(key, len(blocks)) for key in hashes]

    def _now_us(self) -> int:
        return self._us(time.monotonic_ns())

    def _us(self, time_ns: int) -> int:
        return (time_ns - self._zero_ns) // 1000

    def _line(self, row: list[object]) -> None:
        self._file.write(json.dumps(row, separators=(",", ":")) + "\n")
        now_ns = time.monotonic_ns()
        if now_ns - self._flushed_ns > _FLUSH_NS:
            self._file.flush()
            self._flushed_ns = now_ns
