"""The plots of a run's report."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.metrics.result import RunResult
from sim.metrics.run_summary import RunSummary
from sim.metrics.summary import NS_PER_MS, NS_PER_S, RequestTimes, request_times
from sim.metrics.token_gaps import GapPool
from sim.report.svg import Series, line_chart

_ARRIVAL_BINS = 200
_GAP_POINTS = 400


def run_charts(result: RunResult, summary: RunSummary) -> dict[str, str]:
    """All plots of a run by caption; limits of the SLO are dashed lines."""
    times = request_times(result.ledger)
    slos = summary.sim.slo_ms
    first = [
        _cdf("TTFT", [request.ttft_ns / NS_PER_MS for request in times]),
        _cdf("queue", [request.queue_ns / NS_PER_MS for request in times]),
        _cdf("E2E", [request.e2e_ns / NS_PER_MS for request in times]),
    ]
    tpots = [tpot / NS_PER_MS for request in times if (tpot := request.tpot_ns) is not None]
    limits = [(f"SLO {name.upper()}", slos[name]) for name in ("ttft", "e2el") if name in slos]
    tpot_limit = [("SLO TPOT", slos["tpot"])] if "tpot" in slos else []
    ttft_limit = [("SLO TTFT", slos["ttft"])] if "ttft" in slos else []
    share, at_most = "share of requests", "(share of requests at or below)"
    return {
        f"Latency of requests {at_most}": line_chart(
            first, "ms", share, log_x=True, y_max=1.0, steps=True, x_limits=limits
        ),
        f"Time per output token {at_most}": line_chart(
            [_cdf("TPOT", tpots)], "ms", share, y_max=1.0, steps=True, x_limits=tpot_limit
        ),
        "Gaps between tokens, ITL (share of gaps at or below)": line_chart(
            [_gap_cdf(result)], "ms", "share of gaps", log_x=True, y_max=1.0, steps=True
        ),
        "TTFT by arrival": line_chart(
            _ttft_by_arrival(result, times), "arrival, s", "ms", y_limits=ttft_limit
        ),
        "Queue: requests that wait": _over_time(result, "waiting", "requests"),
        "Running requests": _over_time(result, "running", "requests"),
        "KV blocks in use": _over_time(result, "kv_blocks", "% of the pool", pool_share=True),
        "Output tokens per second": _over_time(result, "output_tokens", "tokens/s"),
        "Batch size (share of steps at or below)": line_chart(
            [_batch_cdf(result)], "sequences in a step", "share of steps", y_max=1.0, steps=True
        ),
    }


def _gap_cdf(result: RunResult) -> Series:
    """Share of the gaps between tokens at or below each gap."""
    pool = GapPool()
    for server in result.servers:
        pool.merge(server.gaps)
    gaps, counts = pool.distinct()
    if not len(gaps):
        return Series("ITL", [], [])
    ends = np.cumsum(counts)
    # Enough points for the eye; each is exact.
    chosen = np.searchsorted(ends, np.linspace(1, ends[-1], _GAP_POINTS))
    chosen = np.unique(np.minimum(chosen, len(gaps) - 1))
    shares = ends[chosen] / ends[-1]
    return Series("ITL", np.maximum(gaps[chosen] / NS_PER_MS, 0.01).tolist(), shares.tolist())


def _ttft_by_arrival(result: RunResult, times: Sequence[RequestTimes]) -> list[Series]:
    """Worst and mean TTFT of the requests that arrived in each of 200 bins."""
    arrival_ns = result.ledger.arrival_ns
    width_ns = max(1, result.end_ns // _ARRIVAL_BINS)
    bins: dict[int, list[float]] = {}
    for request in times:
        arrived = arrival_ns[request.row] // width_ns
        bins.setdefault(arrived, []).append(request.ttft_ns / NS_PER_MS)
    middles = [(index + 0.5) * width_ns / NS_PER_S for index in sorted(bins)]
    groups = [bins[index] for index in sorted(bins)]
    return [
        Series("worst", middles, [max(group) for group in groups]),
        Series("mean", middles, [sum(group) / len(group) for group in groups]),
    ]


def _cdf(name: str, values: Sequence[float]) -> Series:
    """Share of values at or below each value; shorter times than 10 us count as that."""
    ordered = [max(value, 0.01) for value in sorted(values)]
    return Series(name, ordered, [(index + 1) / len(ordered) for index in range(len(ordered))])


def _batch_cdf(result: RunResult) -> Series:
    counts: dict[int, int] = {}
    for server in result.servers:
        for batch, steps in server.batch_steps.items():
            counts[batch] = counts.get(batch, 0) + steps
    total, seen = sum(counts.values()), 0
    shares = []
    for batch in sorted(counts):
        seen += counts[batch]
        shares.append(seen / total)
    return Series("batch", [float(batch) for batch in sorted(counts)], shares)


def _over_time(result: RunResult, curve: str, unit: str, pool_share: bool = False) -> str:
    series = []
    for index, server in enumerate(result.servers):
        xs, ys = server.timeline.curve(curve, result.end_ns)
        if pool_share:
            ys = [100 * value / server.num_blocks for value in ys]
        series.append(Series(f"replica {index}", xs, ys))
    return line_chart(
        series,
        "time, s",
        unit,
    )
