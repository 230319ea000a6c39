"""Judges a run against an SLO: latencies of the measured requests, hopelessness, stability."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sim.metrics.percentiles import gap_percentiles, percentiles
from sim.metrics.requests import COMPLETED, PENDING, Ledger
from sim.metrics.stability import is_closed_loop
from sim.metrics.steady import mser5
from sim.metrics.token_gaps import GapPool
from sim.planning.study import METRICS, ShareGoal, Slo
from sim.workloads.table import Workload

NS_PER_MS = 1e6
SHOWN_PERCENTILES = (50.0, 90.0, 99.0)
Column = np.ndarray


@dataclass(frozen=True, slots=True)
class Verdict:
    """A finished run against its SLO.

    `worst` is the largest ratio of a latency to its limit and `binding` the limit it belongs to;
    a goal for a share of requests counts as the ratio of misses to allowed misses. Infinite
    values are None.
    """

    worst: float | None
    binding: str
    latencies_ms: Mapping[str, float | None]
    good_share: float

    @property
    def met(self) -> bool:
        """Whether every limit is kept."""
        return self.worst is not None and self.worst <= 1


# A warm-up that is found may take this share of a run.
MOST_WARMUP = 0.25


def measured_rows(num_rows: int, warmup: float, cooldown: float) -> tuple[int, int]:
    """First and behind the last row that the SLO is about."""
    first = math.floor(num_rows * warmup)
    return first, max(first + 1, num_rows - math.floor(num_rows * cooldown))


class Judge:
    """Watches one run; `workload.output_tokens` are used to judge, never to schedule."""

    def __init__(
        self, workload: Workload, slo: Slo, warmup: float, cooldown: float, miss_rejected: bool
    ) -> None:
        self.first, self.stop = measured_rows(len(workload), warmup, cooldown)
        # The earliest row that is measured whatever warm-up the run shows.
        self._certain = max(self.first, math.floor(len(workload) * MOST_WARMUP))
        self._slo, self._miss_rejected = slo, miss_rejected
        self._outputs = _column(workload.output_tokens)[self.first : self.stop]
        self.num_measured = self.stop - self.first
        self.closed_loop = is_closed_loop(workload)

    def cut_warmup(self, ledger: Ledger) -> None:
        """Leaves out the rows that MSER-5 finds to be warm-up, beyond the share of the study.

        Of the series that a limit of single requests is about, the one that settles last decides.
        """
        status = np.frombuffer(ledger.status, dtype=np.int8)[: self.stop]
        done = np.flatnonzero(status == COMPLETED)
        arrival, first, finish = (
            _column(column)[done].astype(float)
            for column in (ledger.arrival_ns, ledger.first_token_ns, ledger.finish_ns)
        )
        most = int(np.searchsorted(done, self._certain))
        cuts = [mser5(first - arrival, most), mser5(finish - arrival, most)]
        begin = int(done[max(cuts)]) if len(done) else 0
        first_row = min(max(self.first, begin), self.stop - 1)
        self._outputs = self._outputs[first_row - self.first :]
        self.first, self.num_measured = first_row, self.stop - first_row

    def latencies_ms(self, ledger: Ledger) -> dict[str, Column]:
        """Latencies of the measured requests; a rejected one counts as infinite, or not at all."""
        part = slice(self.first, self.stop)
        status = np.frombuffer(ledger.status, dtype=np.int8)[part]
        done = status == COMPLETED
        arrival = _column(ledger.arrival_ns)[part]
        first, finish = _column(ledger.first_token_ns)[part], _column(ledger.finish_ns)[part]
        several = done & (self._outputs > 1)
        tpot = (finish - first)[several] / (self._outputs[several] - 1)
        columns = {"ttft": (first - arrival)[done], "tpot": tpot, "e2el": (finish - arrival)[done]}
        rejected = 0 if not self._miss_rejected else int((~done & (status != PENDING)).sum())
        missing = np.full(rejected, np.inf)
        return {name: np.concatenate([v / NS_PER_MS, missing]) for name, v in columns.items()}

    def num_done(self, ledger: Ledger) -> int:
        """Measured requests that have ended in any way."""
        status = np.frombuffer(ledger.status, dtype=np.int8)[self.first : self.stop]
        return int((status != PENDING).sum())

    def verdict(self, ledger: Ledger, pools: Sequence[GapPool]) -> Verdict:
        """The verdict on a run that has ended."""
        columns = self.latencies_ms(ledger)

        def value_of(metric: str, percent: float | None) -> float:
            if metric == "itl":
                return _gap_statistic_ms(pools, percent)
            return statistic(columns[metric], percent)

        shown = {
            f"p{percent:g} {metric}": value_of(metric, percent)
            for metric in METRICS
            for percent in SHOWN_PERCENTILES
        }
        ratios = {}
        for limit in self._slo.limits:
            shown[limit.name] = value_of(limit.metric, limit.percentile)
            ratios[limit.name] = shown[limit.name] / limit.limit_ms
        if self._slo.goal is not None:
            missed = self._goal_misses(self._slo.goal, ledger, None) / self.num_measured
            allowed = 1 - self._slo.goal.share
            ratios["share"] = missed / allowed if allowed > 0 else math.inf if missed else 0.0
        binding = max(ratios, key=lambda name: ratios[name])
        return Verdict(
            _finite(ratios[binding]),
            binding,
            {name: _finite(value) for name, value in shown.items()},
            self.good_share(ledger),
        )

    def good_share(self, ledger: Ledger) -> float:
        """Share of the measured requests that keep every limit of a single request."""
        bad = self._broken(ledger)
        return 1.0 - float(np.logical_or.reduce(list(bad.values())).mean()) if bad else 1.0

    def hopeless(self, ledger: Ledger, now_ns: int) -> str | None:
        """The limit that is certain to be missed whatever comes, or None."""
        # Rows that the warm-up might still take cannot decide.
        broken = self._slo.request_limits_ms()
        for limit in self._slo.limits:
            if limit.percentile is None or limit.metric not in broken:
                continue
            over = self._late(self._over(ledger, now_ns, limit.metric, limit.limit_ms))
            count = self.num_measured
            if limit.metric == "tpot":
                count = int((self._outputs > 1).sum())
            # The percentile lies at or above the value of this rank, counted from the smallest.
            rank = math.floor((count - 1) * limit.percentile / 100)
            if int(over.sum()) >= count - rank:
                return limit.name
        if self._slo.goal is not None:
            bad = self._goal_misses(self._slo.goal, ledger, now_ns)
            if bad > (1 - self._slo.goal.share) * self.num_measured:
                return "share"
        return None

    def _goal_misses(self, goal: ShareGoal, ledger: Ledger, now_ns: int | None) -> int:
        masks = [self._over(ledger, now_ns, metric, ms) for metric, ms in goal.limits_ms.items()]
        over = np.logical_or.reduce(masks)
        return int((over if now_ns is None else self._late(over)).sum())

    def _late(self, mask: Column) -> Column:
        late: Column = mask[self._certain - self.first :]
        return late

    def _broken(self, ledger: Ledger) -> dict[str, Column]:
        limits = self._slo.request_limits_ms()
        return {name: self._over(ledger, None, name, ms) for name, ms in limits.items()}

    def _over(self, ledger: Ledger, now_ns: int | None, metric: str, limit_ms: float) -> Column:
        """Which measured requests are certain to be over a limit.

        With `now_ns` None the run is over, and what is not completed is over every limit if
        rejected requests count.
        """
        part = slice(self.first, self.stop)
        arrival = _column(ledger.arrival_ns)[part]
        first, finish = _column(ledger.first_token_ns)[part], _column(ledger.finish_ns)[part]
        status = np.frombuffer(ledger.status, dtype=np.int8)[part]
        now = now_ns or 0
        limit = limit_ms * NS_PER_MS
        reached = np.where(first >= 0, first, now)
        ended = np.where(finish >= 0, finish, now)
        if metric == "ttft":
            over = reached - arrival > limit
        elif metric == "e2el":
            over = ended - arrival > limit
        else:
            over = (first >= 0) & (self._outputs > 1)
            over &= ended - reached > limit * np.maximum(1, self._outputs - 1)
        over &= (arrival >= 0) & ((status == COMPLETED) | (status == PENDING))
        if self._miss_rejected:
            over |= (status != COMPLETED) & (status != PENDING)
        mask: Column = over
        return mask


def statistic(values: Column, percent: float | None) -> float:
    """A percentile, or the mean for None; 0 where nothing was measured."""
    if not len(values):
        return 0.0
    return float(values.mean()) if percent is None else percentiles(values, (percent,))[0]


def _gap_statistic_ms(pools: Sequence[GapPool], percent: float | None) -> float:
    """The same over all gaps between tokens of a run, warm-up included."""
    pool = GapPool()
    for one in pools:
        pool.merge(one)
    values, counts = pool.distinct()
    if not len(values):
        return 0.0
    if percent is None:
        return float((values * (counts / int(counts.sum()))).sum()) / NS_PER_MS
    return gap_percentiles(pool, (percent,))[0] / NS_PER_MS


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _column(values: Sequence[int]) -> Column:
    return np.frombuffer(values, dtype=np.int64)  # type: ignore[call-overload,no-any-return]
