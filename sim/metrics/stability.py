"""Whether a run's load can be served for ever, judged from the requests in the system."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.metrics.requests import COMPLETED, PENDING, Ledger

# A queue that takes in at least this share more than it lets out, for the later half of the
# arrivals and in each quarter of it, is growing and not fluctuating.
_GROWTH = 0.05
_MIN_FOR_STABILITY = 200


def is_stable(ledger: Ledger) -> bool:
    """False if the number of requests in the system kept growing while requests arrived.

    Only arrivals after the first half of the time count: a run that begins empty fills up first.
    """
    status = np.frombuffer(ledger.status, dtype=np.int8)
    served = (status == COMPLETED) | (status == PENDING)
    arrivals = np.sort(_int_column(ledger.arrival_ns)[served])
    arrivals = arrivals[arrivals >= 0]
    if len(arrivals) < _MIN_FOR_STABILITY:
        return True
    finishes = _int_column(ledger.finish_ns)
    finishes = np.sort(finishes[finishes >= 0])
    begin, end = int(arrivals[0]), int(arrivals[-1])
    cuts = np.linspace(begin + (end - begin) / 2, end, 5)
    came = np.searchsorted(arrivals, cuts, side="right")
    gone = np.searchsorted(finishes, cuts, side="right")
    inside = came - gone
    grows_throughout = bool((np.diff(inside) > 0).all())
    return not (grows_throughout and inside[-1] - inside[0] > _GROWTH * (came[-1] - came[0]))


def _int_column(values: Sequence[int]) -> np.ndarray:
    return np.frombuffer(values, dtype=np.int64)  # type: ignore[call-overload,no-any-return]
