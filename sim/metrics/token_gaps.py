"""Gaps between tokens, pooled over all requests, kept as (gap, how often) pairs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from engine.core.plan import DecodeBatch
from engine.core.request import RequestId

_COMPACT_AT = 1 << 21


class GapPool:
    """Exact multiset of gaps in ns; memory grows with distinct gaps, not with tokens."""

    def __init__(self) -> None:
        self._gaps_ns = array("q")
        self._counts = array("q")
        self._limit = _COMPACT_AT

    def add(self, gap_ns: int, count: int = 1) -> None:
        """Adds a gap that `count` tokens have."""
        self._gaps_ns.append(gap_ns)
        self._counts.append(count)

    def extend(self, gaps_ns: Sequence[int], count: int) -> None:
        """Adds gaps that `count` tokens have each."""
        self._gaps_ns.extend(gaps_ns)
        self._counts.extend([count] * len(gaps_ns))
        if len(self._gaps_ns) > self._limit:
            values, counts = self.distinct()
            self._gaps_ns, self._counts = array("q", values.tolist()), array("q", counts.tolist())
            self._limit = max(_COMPACT_AT, 2 * len(self._gaps_ns))

    def merge(self, other: GapPool) -> None:
        """Adds all gaps of another pool."""
        self._gaps_ns.extend(other._gaps_ns)
        self._counts.extend(other._counts)

    def distinct(self) -> tuple[np.ndarray, np.ndarray]:
        """Sorted distinct gaps and their counts."""
        gaps = np.frombuffer(self._gaps_ns, dtype=np.int64)
        counts = np.frombuffer(self._counts, dtype=np.int64)
        values, inverse = np.unique(gaps, return_inverse=True)
        sums = np.zeros(len(values), dtype=np.int64)
        np.add.at(sums, inverse, counts)
        return values, sums


class TokenClock:
    """When each request got its newest token, told step by step; books the gaps into a pool.

    All rows of a decode batch get their tokens at one time, so only rows that come and go are
    looked at one by one.
    """

    def __init__(self, pool: GapPool) -> None:
        self._pool = pool
        self._batch: DecodeBatch | None = None
        self._rows: frozenset[RequestId] = frozenset()
        self._rows_ns = 0  # newest token of all `_rows`
        self._newest_ns: dict[RequestId, int] = {}  # of requests that are not in `_rows`
        self._ended: set[RequestId] = set()

    def decode(self, batch: DecodeBatch, ends_ns: Sequence[int]) -> None:
        """Every row of the batch gets one token at each of these times."""
        end_ns = ends_ns[0]
        regular = len(batch)
        if batch is not self._batch:
            regular = self._enter(batch, end_ns)
        if regular:
            self._pool.add(end_ns - self._rows_ns, regular)
        if len(ends_ns) > 1:
            self._pool.extend([after - before for before, after in pairwise(ends_ns)], len(batch))
        self._rows_ns = ends_ns[-1]

    def prompt_done(self, request_id: RequestId, end_ns: int) -> None:
        """A chunk ended the known tokens of a request, which gets a token."""
        before = self._newest_ns.get(request_id)
        if before is not None:
            self._pool.add(end_ns - before)
        self._newest_ns[request_id] = end_ns

    def resume(self, request_id: RequestId, token_ns: int) -> None:
        """A request comes from another server, where it got its newest token."""
        self._newest_ns[request_id] = token_ns

    def preempted(self, request_id: RequestId) -> None:
        """A request leaves its batch and will come back through a chunk, unless it has ended."""
        if request_id in self._rows and request_id not in self._ended:
            self._newest_ns[request_id] = self._rows_ns
            self._rows -= {request_id}

    def finished(self, request_id: RequestId) -> None:
        """A request gets no more tokens."""
        if request_id in self._rows:
            self._ended.add(request_id)
        else:
            self._newest_ns.pop(request_id, None)

    def _enter(self, batch: DecodeBatch, end_ns: int) -> int:
        """Changes over to another batch; returns how many rows stay."""
        rows = frozenset(batch.request_ids)
        for request_id in self._rows - rows - self._ended:
            self._newest_ns[request_id] = self._rows_ns
        self._ended.clear()
        new_rows = rows - self._rows
        for request_id in new_rows:
            self._pool.add(end_ns - self._newest_ns.pop(request_id))
        self._batch, self._rows = batch, rows
        return len(rows) - len(new_rows)
