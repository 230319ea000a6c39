"""Joins what a benchmark's clients saw to the log of a recording vLLM, by the order of requests.

The result of `vllm bench serve --save-result --save-detailed` says when each request was sent and
when each of its tokens arrived; the log says when the scheduler got it. Both run on the monotonic
clock of their machine. The benchmark's own test requests come first and are in the log only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.errors import InputError
from engine.steplog.atomic import write_text
from engine.steplog.vllm_log_reader import read_vllm_log, rows_of_log
from engine.steplog.vllm_run import RecordedRequest

_KEYS = ("output_lens", "start_times", "ttfts", "itls")
# Requests that are sent at almost the same time may reach the server in another order.
MOST_PLACES_OFF = 16
# A request is on its way for less; more means that the clocks are not the same.
MOST_WAY_US = 1_000_000


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """One request as its client saw it; `start_us` by the client's clock."""

    place: int  # in the result's columns
    output_tokens: int
    start_us: int
    ttft_us: int
    token_gaps_us: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """How a join went."""

    num_joined: int
    num_before: int  # requests of the log that the result does not hold
    same_clock: bool


def join_clients(log: Path, result: Path, out: Path) -> Joined:
    """Writes the log with the clients' times; each joined request gains a line of kind `c`.

    Raises:
        InputError: a file is wrong, or the two are not of one run; nothing was written.
    """
    recording = read_vllm_log(log)
    sent = sorted(recording.requests, key=lambda request: request.arrival_us)
    seen = read_result(result)
    matched, num_before = _match(log, result, sent, seen)
    rows = list(rows_of_log(log))
    shift_us, same_clock = _shift(matched, rows[0].get("monotonic_us"))
    lines = [_client_line(request, client, shift_us) for client, request in matched]
    header, kept = rows[0], [row for row in rows[1:] if row[0] not in ("c", "e")]
    end = [row for row in rows[1:] if row[0] == "e"]
    texts = [json.dumps(row, separators=(",", ":")) for row in (header, *kept, *lines, *end)]
    write_text(out, "\n".join(texts) + "\n")
    return Joined(len(matched), num_before, same_clock)


def read_result(path: Path) -> list[SeenRequest]:
    """The requests that were answered, in the order in which they were sent.

    Raises:
        InputError: it is no detailed result of `vllm bench serve`.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: no JSON that can be read ({error})") from None
    columns = _columns(path, document)
    seen = []
    for place, (outputs, start, ttft, gaps) in enumerate(zip(*columns, strict=True)):
        try:
            if outputs < 1 or ttft <= 0:
                continue
            gaps_us = tuple(round(gap * 1e6) for gap in gaps)
            request = SeenRequest(place, outputs, round(start * 1e6), round(ttft * 1e6), gaps_us)
        except TypeError:
            raise InputError(f"{path}: request {place}: must hold numbers") from None
        seen.append(request)
    if not seen:
        raise InputError(f"{path}: holds no request that was answered")
    return sorted(seen, key=lambda request: request.start_us)


def _columns(path: Path, document: object) -> list[list[Any]]:
    if not isinstance(document, Mapping):
        raise InputError(f"{path}: not the result of vllm bench serve")
    columns = []
    for key in _KEYS:
        column = document.get(key)
        if not isinstance(column, list):
            raise InputError(f"{path}: {key} is missing: save it with --save-detailed")
        columns.append(column)
    if len({len(column) for column in columns}) != 1:
        raise InputError(f"{path}: {', '.join(_KEYS)} are of different lengths")
    return columns


def _match(
    log: Path, result: Path, sent: Sequence[RecordedRequest], seen: Sequence[SeenRequest]
) -> tuple[list[tuple[SeenRequest, RecordedRequest]], int]:
    """Pairs in the order of sending, and how many requests of the log came before."""
    extra = len(sent) - len(seen)
    if extra < 0:
        raise InputError(f"{result}: {len(seen)} requests were answered, {log} holds {len(sent)}")
    furthest, problem = -1, ""
    for first in range(extra, -1, -1):
        found = _pairs(sent[first : first + len(seen)], seen)
        if isinstance(found, list):
            return found, first
        if found > furthest:
            furthest = found
            problem = (
                f"request {seen[found].place} has {seen[found].output_tokens} output tokens, and"
                f" none such is near its place in {log}: not the same run"
            )
    raise InputError(f"{result}: {problem}")


def _pairs(
    sent: Sequence[RecordedRequest], seen: Sequence[SeenRequest]
) -> list[tuple[SeenRequest, RecordedRequest]] | int:
    """Pairs, or the place of the first request without a partner."""
    pairs, taken = [], [False] * len(sent)
    for place, client in enumerate(seen):
        for other in _outwards(place, len(sent)):
            if not taken[other] and _may_be(sent[other], client):
                taken[other] = True
                pairs.append((client, sent[other]))
                break
        else:
            return place
    return pairs


def _outwards(place: int, size: int) -> Iterator[int]:
    """Places from the given one on, nearest first."""
    yield place
    for off in range(1, MOST_PLACES_OFF + 1):
        if place - off >= 0:
            yield place - off
        if place + off < size:
            yield place + off


def _may_be(request: RecordedRequest, client: SeenRequest) -> bool:
    return request.reason == "" or request.output_tokens == client.output_tokens


def _shift(
    pairs: Sequence[tuple[SeenRequest, RecordedRequest]], zero_us: int | None
) -> tuple[int, bool]:
    """What turns the clients' clock into the log's, and whether the two are one clock."""
    least = min(request.arrival_us - client.start_us for client, request in pairs)
    if zero_us is not None and 0 <= least + zero_us <= MOST_WAY_US:
        return -zero_us, True
    return least, False  # the fastest request was on its way for no time


def _client_line(request: RecordedRequest, client: SeenRequest, shift_us: int) -> list[object]:
    sent_us = client.start_us + shift_us
    return ["c", request.id, sent_us, sent_us + client.ttft_us, list(client.token_gaps_us)]
