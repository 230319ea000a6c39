"""Columns of the requests that are in: rows are given back, so that a twin may run for months."""

from __future__ import annotations

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
        row = len(self.status)
        for column in (
            self.arrival_ns,
            self.first_scheduled_ns,
            self.first_token_ns,
            self.finish_ns,
            self.replica,
        ):
            column.append(UNSET)
        self.status.append(PENDING)
        for counts in (self.hit_tokens, self.preemptions, self.preempted_ns, self.output_tokens):
            counts.append(0)
        return row

    def give_back(self, row: int) -> None:
        """Clears a row whose request has ended."""
        for column in (
            self.arrival_ns,
            self.first_scheduled_ns,
            self.first_token_ns,
            self.finish_ns,
            self.replica,
        ):
            column[row] = UNSET
        self.status[row] = PENDING
        for counts in (self.hit_tokens, self.preemptions, self.preempted_ns, self.output_tokens):
            counts[row] = 0
        self._free.append(row)
