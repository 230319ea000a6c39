"""What happened to every request, as compact columns, and the number of requests over time."""

from __future__ import annotations

from array import array

UNSET = -1
# Values of the `status` column.
PENDING, COMPLETED, REJECTED, STARVED = range(4)
STATUS_NAMES = ("pending", "completed", "rejected", "unsent")


class Population:
    """A count over time and its exact integral."""

    __slots__ = ("_since_ns", "area_ns", "count", "peak")

    def __init__(self) -> None:
        self.count = self.peak = self.area_ns = self._since_ns = 0

    def change(self, by: int, time_ns: int) -> None:
        """Adds to the count; times never decrease (LAW-M1)."""
        assert time_ns >= self._since_ns, "LAW-M1: the clock never goes back"
        self.area_ns += self.count * (time_ns - self._since_ns)
        self._since_ns = time_ns
        self.count += by
        self.peak = max(self.peak, self.count)


class Ledger:
    """Per-request columns by row of the workload; all times in ns from the start of the run."""

    def __init__(self, num_rows: int) -> None:
        self.arrival_ns = _column(num_rows)
        self.first_scheduled_ns = _column(num_rows)
        self.first_token_ns = _column(num_rows)
        self.finish_ns = _column(num_rows)
        self.replica = array("i", [UNSET]) * num_rows
        self.status = array("b", [PENDING]) * num_rows
        self.hit_tokens = array("q", [0]) * num_rows
        self.preemptions = array("i", [0]) * num_rows
        self.preempted_ns = array("q", [0]) * num_rows
        self.output_tokens = array("q", [0]) * num_rows
        self.rejections: dict[str, int] = {}
        self.first_rejection = ""
        # LAW-M3: these integrals are kept apart from the columns; Little's law can check both.
        self.in_system = Population()
        self.in_queue = Population()
        self._preempted_at: dict[int, int] = {}
        self._moving: set[int] = set()
        # When requests began and ceased to wait for a second server, in the order of time.
        self.handed_over_ns = array("q")
        self.moved_in_ns = array("q")

    def __len__(self) -> int:
        return len(self.status)

    def arrived(self, row: int, time_ns: int) -> None:
        """A request was sent."""
        self.arrival_ns[row] = time_ns
        self.in_system.change(1, time_ns)
        self.in_queue.change(1, time_ns)

    def rejected(self, row: int, time_ns: int, reason: str, detail: str) -> None:
        """A request that has arrived was left out."""
        self.status[row] = REJECTED
        self.rejections[reason] = self.rejections.get(reason, 0) + 1
        self.first_rejection = self.first_rejection or detail
        self.in_system.change(-1, time_ns)
        self.in_queue.change(-1, time_ns)

    def admitted(self, row: int, time_ns: int, hit_tokens: int) -> None:
        """A request left the queue, for the first time or after a preemption."""
        self.in_queue.change(-1, time_ns)
        if self.first_scheduled_ns[row] == UNSET:
            self.first_scheduled_ns[row] = time_ns
            self.hit_tokens[row] = hit_tokens
        elif row in self._moving:
            self._moving.discard(row)
            self.moved_in_ns.append(time_ns)
        else:
            self._back_from_preemption(row, time_ns)

    def preempted(self, row: int, time_ns: int) -> None:
        """A request lost its blocks and went back to the queue."""
        self.in_queue.change(1, time_ns)
        self.preemptions[row] += 1
        self._preempted_at[row] = time_ns

    def handed_over(self, row: int, time_ns: int) -> None:
        """A request left one server and waits to be admitted by another."""
        self.in_queue.change(1, time_ns)
        self._moving.add(row)
        self.handed_over_ns.append(time_ns)

    def finished(self, row: int, time_ns: int, output_tokens: int) -> None:
        """A request got its last token."""
        self.status[row] = COMPLETED
        self.finish_ns[row] = time_ns
        self.output_tokens[row] = output_tokens
        self.in_system.change(-1, time_ns)
        if row in self._preempted_at:  # a token in flight has ended it in the queue (P-P7)
            self.in_queue.change(-1, time_ns)
            self._back_from_preemption(row, time_ns)

    def _back_from_preemption(self, row: int, time_ns: int) -> None:
        self.preempted_ns[row] += time_ns - self._preempted_at.pop(row)


def _column(num_rows: int) -> array[int]:
    return array("q", [UNSET]) * num_rows
