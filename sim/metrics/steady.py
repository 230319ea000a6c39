"""Whether a run lasts long enough to speak of a steady state, and where its warm-up ends.

A run from an empty system says little about load that lasts before it has lasted for several times
the slowest thing in it: a session, a request, or the time that a queue takes to forget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sim.metrics.requests import COMPLETED, Ledger
from sim.workloads.table import Workload

Column = np.ndarray
_BATCH = 5
# The sum over lags ends here, in units of the sum itself: later lags are noise (Sokal).
_WINDOW = 5


@dataclass(frozen=True, slots=True)
class TimeScale:
    """The slowest process of a run: `session`, `request` or `queue`, and its length."""

    name: str
    seconds: float


def mser5(series: Column, most: int) -> int:
    """Length of the warm-up by MSER-5, at most `most` values (White 1997).

    Of all cuts between batches of five the one after which the mean's standard error, as if
    batches were independent, is smallest.
    """
    count = len(series) // _BATCH
    if count < 4 or most < _BATCH:
        return 0
    batches = series[: count * _BATCH].reshape(count, _BATCH).mean(axis=1)
    # Sums over all batches from each cut on.
    left = np.arange(count, 0, -1)
    sums = np.cumsum(batches[::-1])[::-1]
    squares = np.cumsum((batches**2)[::-1])[::-1]
    errors = np.maximum(0.0, squares - sums**2 / left) / left**2
    last = min(most // _BATCH, count - 2)
    return int(np.argmin(errors[: last + 1])) * _BATCH


def correlation_length(series: Column) -> float:
    """How many values in a row tell as much as one independent one (integrated autocorrelation)."""
    count = len(series)
    centred = series - series.mean() if count else series
    size = 1 << (2 * count - 1).bit_length() if count else 1
    power = np.abs(np.fft.rfft(centred, size)) ** 2
    products = np.fft.irfft(power, size)[:count]
    if count < 2 or not products[0] > 1e-12 * max(1.0, float(np.abs(series).max())) ** 2:
        return 1.0
    sums = 2 * np.cumsum(products / products[0]) - 1
    lags = np.arange(count)
    inside = np.flatnonzero(lags >= _WINDOW * sums)
    return max(1.0, float(sums[inside[0]] if len(inside) else sums.max()))


def longest_scale(workload: Workload, ledger: Ledger) -> TimeScale:
    """The slowest process that a run has shown."""
    status = np.frombuffer(ledger.status, dtype=np.int8)
    rows = np.flatnonzero(status == COMPLETED)
    if not len(rows):
        return TimeScale("request", math.inf)
    arrival, first, finish = (
        np.frombuffer(column, dtype=np.int64)[rows]
        for column in (ledger.arrival_ns, ledger.first_token_ns, ledger.finish_ns)
    )
    order = np.argsort(arrival, kind="stable")
    waits = (first - arrival)[order].astype(float)
    span_ns = float(arrival.max() - arrival.min())
    scales = [
        TimeScale("request", float((finish - arrival).mean()) / 1e9),
        TimeScale("queue", correlation_length(waits) * span_ns / len(rows) / 1e9),
    ]
    if workload.next_row is not None:
        scales.append(TimeScale("session", _mean_session_ns(workload, ledger) / 1e9))
    return max(scales, key=lambda scale: scale.seconds)


def thinking_ns(workload: Workload) -> float:
    """Mean time that a session's user thinks, below which no session can be."""
    if workload.next_row is None or workload.think_ns is None:
        return 0.0
    starts = sum(time >= 0 for time in workload.arrival_ns)
    pairs = zip(workload.next_row, workload.think_ns, strict=True)
    return sum(think for after, think in pairs if after >= 0) / max(1, starts)


def span_ns(workload: Workload) -> int:
    """From 0 to the last arrival that is known before the run."""
    return max(workload.arrival_ns, default=0)


def _mean_session_ns(workload: Workload, ledger: Ledger) -> float:
    """From the first turn's arrival to the last turn's end, over sessions that ended."""
    after = workload.next_row
    assert after is not None
    total, count = 0, 0
    begin_of: dict[int, int] = {}
    for row, time_ns in enumerate(workload.arrival_ns):
        begin = ledger.arrival_ns[row] if time_ns >= 0 else begin_of.pop(row, -1)
        if begin < 0:
            continue
        if after[row] >= 0:
            begin_of[after[row]] = begin
        elif ledger.finish_ns[row] >= 0:
            total += ledger.finish_ns[row] - begin
            count += 1
    return total / count if count else 0.0
