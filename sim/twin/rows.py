"""Columns of the requests that are in: rows are given back, so that a twin may run for months."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from sim.metrics.requests import PENDING, UNSET, Ledger


class RowPool(Ledger):
    """A ledger whose rows are used again; it grows to the most requests that were in at a time."""

    def __init__(self) -> None:
        super().__init__(0)
        self._free: list[int] = []

    def take(self) -> int:
        """A row in which nothing is written."""
        if self._free:
            return self._free.pop()
        for column, empty in self._columns():
            column.append(empty)
        return len(self.status) - 1

    def give_back(self, row: int) -> None:
        """Clears a row whose request has ended."""
        for column, empty in self._columns():
            column[row] = empty
        self._free.append(row)

    def _columns(self) -> Iterator[tuple[array[int], int]]:
        """Every column, and what stands in a row of which nothing is known."""
        for column in (
            self.arrival_ns,
            self.first_scheduled_ns,
            self.first_token_ns,
            self.finish_ns,
            self.replica,
        ):
            yield column, UNSET
        yield self.status, PENDING
        for column in (self.hit_tokens, self.preemptions, self.preempted_ns, self.output_tokens):
            yield column, 0
