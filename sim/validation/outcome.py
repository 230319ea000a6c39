"""What a run came to, in one form for recorded, teacher-forced and simulated runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sim.metrics.percentiles import percentiles
from sim.metrics.summary import NS_PER_MS, NS_PER_S, pooled_latency
from sim.metrics.token_gaps import GapPool

LATENCIES = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2E", "e2el"))
STATISTICS = (("mean", "mean"), ("p50", "median"), ("p90", "p90"), ("p99", "p99"))
LOADS = (
    ("output throughput, tok/s", "output_throughput"),
    ("request throughput, req/s", "request_throughput"),
    ("mean running requests", "mean_running"),
    ("mean KV utilisation", "mean_kv_utilisation"),
    ("peak KV utilisation", "peak_kv_utilisation"),
)

Times = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Curves:
    """Running requests and blocks in use over time, constant from each time to the next."""

    time_s: Sequence[float]
    running: Sequence[float]
    kv_blocks: Sequence[float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times by request, in the order in which the engine got them; all in ns of one clock."""

    arrival_ns: Times
    first_token_ns: Times
    finish_ns: Times
    output_tokens: Times
    gaps: GapPool
    end_ns: int
    running_ns: float
    kv_block_ns: float
    kv_peak_blocks: int
    num_blocks: int
    num_steps: int
    curves: Curves

    def metrics(self) -> dict[str, float]:
        """Latencies in ms and loads, keyed as in a run's summary."""
        ttft = (self.first_token_ns - self.arrival_ns) / NS_PER_MS
        e2e = (self.finish_ns - self.arrival_ns) / NS_PER_MS
        many = self.output_tokens > 1
        tpot = (e2e - ttft)[many] / (self.output_tokens[many] - 1)
        metrics: dict[str, float] = {}
        for name, values in (("ttft", ttft), ("tpot", tpot), ("e2el", e2e)):
            cuts = percentiles(values, (50, 90, 99))
            metrics[f"mean_{name}_ms"] = float(values.mean()) if len(values) else float("nan")
            for (_, statistic), cut in zip(STATISTICS[1:], cuts, strict=True):
                metrics[f"{statistic}_{name}_ms"] = cut
        pooled = pooled_latency(self.gaps)
        for _, statistic in STATISTICS:
            value = getattr(pooled, statistic)
            metrics[f"{statistic}_itl_ms"] = float("nan") if value is None else value
        duration_s = (self.end_ns - int(self.arrival_ns.min())) / NS_PER_S
        span_ns = duration_s * NS_PER_S
        metrics["output_throughput"] = float(self.output_tokens.sum()) / duration_s
        metrics["request_throughput"] = len(self.arrival_ns) / duration_s
        metrics["mean_running"] = self.running_ns / span_ns
        metrics["mean_kv_utilisation"] = self.kv_block_ns / span_ns / self.num_blocks
        metrics["peak_kv_utilisation"] = self.kv_peak_blocks / self.num_blocks
        return metrics


class OutcomeBuilder:
    """Collects an outcome step by step."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._row_of: dict[int | str, int] = {}
        self._arrival: list[int] = []
        self._tokens: list[list[int]] = []
        self._ends: list[int] = []
        self._starts: list[int] = []
        self._running: list[int] = []
        self._used: list[int] = []

    def add(self, request_id: int | str, arrival_ns: int) -> None:
        """A request that the engine got."""
        self._row_of[request_id] = len(self._arrival)
        self._arrival.append(arrival_ns)
        self._tokens.append([])

    def step(
        self, start_ns: int, end_ns: int, sampled: Sequence[int | str], running: int, used: int
    ) -> None:
        """A step whose tokens left at `end_ns`."""
        self._starts.append(start_ns)
        self._ends.append(end_ns)
        self._running.append(running)
        self._used.append(used)
        for request_id in sampled:
            self._tokens[self._row_of[request_id]].append(end_ns)

    def outcome(self) -> Outcome:
        """The outcome; requests without a token are left out."""
        gaps = GapPool()
        for tokens in self._tokens:
            gaps.extend([after - before for before, after in pairwise(tokens)], 1)
        done = [row for row, tokens in enumerate(self._tokens) if tokens]
        spans = np.array(self._ends) - np.array(self._starts)
        times = [start / NS_PER_S for start in self._starts]
        return Outcome(
            arrival_ns=np.array([self._arrival[row] for row in done], dtype=np.int64),
            first_token_ns=np.array([self._tokens[row][0] for row in done], dtype=np.int64),
            finish_ns=np.array([self._tokens[row][-1] for row in done], dtype=np.int64),
            output_tokens=np.array([len(self._tokens[row]) for row in done], dtype=np.int64),
            gaps=gaps,
            end_ns=self._ends[-1],
            running_ns=float(spans @ np.array(self._running)),
            kv_block_ns=float(spans @ np.array(self._used)),
            kv_peak_blocks=max(self._used),
            num_blocks=self._num_blocks,
            num_steps=len(self._starts),
            curves=Curves(times, self._running, self._used),
        )
