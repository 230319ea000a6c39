"""Whether a run's load can be served for ever, judged from the requests that wait.

Two questions, each with its uncertainty. Was more work offered than could be served? While
requests wait, a system works as fast as it can, so work is measured in that time: what was left
when arrivals ended took some time to drain, and the time in which nobody waited had room for some
more. Or has the load, whatever its mean, ended in an overload that nothing says will pass?
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sim.metrics.requests import REJECTED, UNSET, Ledger
from sim.workloads.table import Workload

_MIN_FOR_STABILITY = 200
# Shorter waits than this share of the run are those for the end of a step.
_SHORTEST_WAIT = 1e-3
# The last overload is a burst if it lasted for less of the run, or if its parts differ so much
# that their mean is within this many standard errors of 0.
_LEAST_SPAN = 0.125
_PARTS, _ERRORS = 8, 3.5
# Although nobody waits, finishes fall behind arrivals by this share of the time.
_UNQUEUED_GROWTH = 0.1

Column = np.ndarray


@dataclass(frozen=True, slots=True)
class Backlog:
    """Requests that wait, as the times when one begins (`ins`) and ceases to (`outs`), sorted.

    All times are ns after the first arrival; the last arrival is at `span_ns`.
    """

    ins: Column
    outs: Column
    span_ns: float
    num_requests: int

    def waiting(self, times_ns: Column) -> Column:
        """How many wait at each time, after what happens at it."""
        came = np.searchsorted(self.ins, times_ns, side="right")
        return came - np.searchsorted(self.outs, times_ns, side="right")

    def busy_spans(self) -> list[tuple[float, float]]:
        """Maximal times with somebody waiting, without those too short to be a queue."""
        times = np.concatenate([self.ins, self.outs])
        changes = np.concatenate([np.ones(len(self.ins)), -np.ones(len(self.outs))])
        # At one time those that come go first, so that a hand-over makes no gap.
        order = np.lexsort((-changes, times))
        times, count = times[order], np.cumsum(changes[order])
        some = np.concatenate([[False], count > 0])
        begins = times[np.flatnonzero(~some[:-1] & some[1:])]
        ends = times[np.flatnonzero(some[:-1] & ~some[1:])]
        if len(ends) < len(begins):
            ends = np.append(ends, self.drained_ns)
        long = ends - begins >= _SHORTEST_WAIT * self.span_ns
        return list(zip(begins[long].tolist(), ends[long].tolist(), strict=True))

    @property
    def drained_ns(self) -> float:
        """When nobody waits any more; a run that was cut short is continued at its late pace."""
        last = float(self.outs[-1]) if len(self.outs) else 0.0
        left = len(self.ins) - len(self.outs)
        if not left:
            return last
        late = self.outs[len(self.outs) // 2 :]
        pace = (len(late) - 1) / max(1.0, last - float(late[0])) if len(late) > 1 else 0.0
        return last + left / pace if pace else math.inf


def is_closed_loop(workload: Workload) -> bool:
    """Whether all senders have sent at the start, so that they bound the requests in the system."""
    return workload.next_row is not None and max(workload.arrival_ns) <= 0


def is_stable(ledger: Ledger, closed_loop: bool = False) -> bool:
    """False if more work came than could be served, or the run ends in a lasting overload."""
    backlog = backlog_of(ledger)
    if closed_loop or backlog.num_requests < _MIN_FOR_STABILITY or not backlog.span_ns:
        return True
    drain_ns = backlog.drained_ns - backlog.span_ns
    # By chance alone the offered work strays from its mean by this share.
    margin = 1 / math.sqrt(backlog.num_requests)
    if drain_ns > margin * backlog.span_ns:
        excess_ns = drain_ns - _spare_ns(backlog)
        return not (excess_ns > margin * backlog.span_ns or _ends_in_overload(backlog))
    return not _grows_unqueued(ledger)


def backlog_of(ledger: Ledger) -> Backlog:
    """The requests of a run that waited for admission, at first or after moving to a server."""
    status = np.frombuffer(ledger.status, dtype=np.int8)
    arrivals = _int_column(ledger.arrival_ns)
    sent = (status != REJECTED) & (arrivals != UNSET)
    if not sent.any():
        return Backlog(np.empty(0), np.empty(0), 0.0, 0)
    admissions = _int_column(ledger.first_scheduled_ns)
    # Of a finish without an admission nobody can say that it waited.
    unseen = (admissions == UNSET) & (_int_column(ledger.finish_ns) != UNSET)
    admissions = np.where(unseen, arrivals, admissions)
    begin = int(arrivals[sent].min())
    ins = np.concatenate([arrivals[sent], np.array(ledger.handed_over_ns, np.int64)])
    admitted = admissions[sent & (admissions != UNSET)]
    outs = np.concatenate([admitted, np.array(ledger.moved_in_ns, np.int64)])
    span = float(arrivals[sent].max() - begin)
    return Backlog(np.sort(ins) - begin, np.sort(outs) - begin, span, int(sent.sum()))


def _spare_ns(backlog: Backlog) -> float:
    """Time in which more could have been served, before the last arrival.

    Where nobody waits, the pace is that of the arrivals; compared with the pace while some wait it
    says which share of the time was needed.
    """
    spans = backlog.busy_spans()
    waited_ns = sum(end - begin for begin, end in spans)
    served = sum(
        int(np.searchsorted(backlog.outs, end, "right") - np.searchsorted(backlog.outs, begin))
        for begin, end in spans
    )
    idle_ns = backlog.span_ns - sum(
        min(end, backlog.span_ns) - min(begin, backlog.span_ns) for begin, end in spans
    )
    if not served or not math.isfinite(waited_ns):
        return 0.0
    needed_ns = max(0, len(backlog.outs) - served) * waited_ns / served
    return max(0.0, idle_ns - needed_ns)


def _ends_in_overload(backlog: Backlog) -> bool:
    """Whether the queue at the last arrival grew steadily, for long, and as none before it."""
    spans = backlog.busy_spans()
    begin = next((a for a, b in spans if a <= backlog.span_ns <= b), None)
    if begin is None or backlog.span_ns - begin < _LEAST_SPAN * backlog.span_ns:
        return False
    heights = backlog.waiting(np.linspace(begin, backlog.span_ns, _PARTS + 1))
    steps = np.diff(heights)
    error = float(steps.std(ddof=1)) / math.sqrt(_PARTS)
    if not steps.mean() > _ERRORS * error:
        return False
    before = backlog.outs[backlog.outs < begin]
    passed = int(backlog.waiting(before - 1).max()) if len(before) else 0
    return int(heights[-1]) > 2 * passed


def _grows_unqueued(ledger: Ledger) -> bool:
    """Whether the requests that run pile up, quarter by quarter of the later half.

    Both their number and the lag of the n-th finish behind the n-th arrival must grow: under a
    load that rises within what can be served the number grows alone, while a system fills up the
    lag does.
    """
    status = np.frombuffer(ledger.status, dtype=np.int8)
    arrivals = _int_column(ledger.arrival_ns)
    arrivals = np.sort(arrivals[(status != REJECTED) & (arrivals != UNSET)])
    finishes = _int_column(ledger.finish_ns)
    finishes = np.sort(finishes[finishes != UNSET])
    if len(finishes) < _MIN_FOR_STABILITY:
        return False
    begin, end = (int(arrivals[0]) + int(arrivals[-1])) / 2, int(arrivals[-1])
    cuts = np.linspace(begin, end, 5)
    came = np.searchsorted(arrivals, cuts, side="right")
    inside = came - np.searchsorted(finishes, cuts, side="right")
    ranks = np.minimum(came, len(finishes)) - 1
    lags = finishes[ranks] - arrivals[ranks]
    grows = bool((np.diff(inside) > 0).all() and (np.diff(lags) > 0).all())
    return grows and lags[-1] - lags[0] > _UNQUEUED_GROWTH * (end - begin)


def _int_column(values: Sequence[int]) -> Column:
    return np.frombuffer(values, dtype=np.int64)  # type: ignore[call-overload,no-any-return]
