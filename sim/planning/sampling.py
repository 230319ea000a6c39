"""Workloads for runs: any length, rate and seed from one trace or generator.

Common random numbers: a seed decides which requests come and how their gaps relate to each
other, the rate only stretches time. So two configurations, or two rates, meet the same requests.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from engine.core.errors import InputError
from sim.planning.study import WorkloadSpec
from sim.workloads.arrivals import draw_arrivals
from sim.workloads.generators import generate, preset
from sim.workloads.readers import TraceOptions, read_lengths, read_trace
from sim.workloads.servegen import ServeGenOptions, is_servegen, read_servegen
from sim.workloads.table import Workload


@dataclass(frozen=True, slots=True)
class Source:
    """A loaded workload that runs are drawn from; `digest` identifies its content."""

    spec: WorkloadSpec
    base: Workload | None
    digest: str

    @property
    def name(self) -> str:
        """Name of the trace or generator."""
        return self.spec.generator or (self.base.name if self.base is not None else "")

    @property
    def rate_unit(self) -> str:
        """What a rate counts."""
        kind = "" if self.spec.generator is None else preset(self.spec.generator).kind
        return "sessions/s" if kind == "sessions" else "requests/s"

    def draw(self, rate: float, num_requests: int, seed: int) -> Workload:
        """A run's requests, which arrive at exactly that mean rate.

        Raises:
            InputError: the trace is too short for requests that share prefixes.
        """
        if self.base is None:
            return self._generated(rate, num_requests, seed)
        rng = np.random.default_rng((seed, 7))
        if self.base.hashed is not None:
            rows = self._window(num_requests, rng)
        else:
            rows = self._blocks(num_requests, rng)
        drawn = self._rows(self.base, rows)
        gaps = self._gaps(self.base, rows, seed)
        drawn.arrival_ns = _scaled(gaps, rate)
        return drawn

    def _generated(self, rate: float, num_requests: int, seed: int) -> Workload:
        name = self.spec.generator
        assert name is not None
        spec = preset(name, **{**self.spec.parameters, "rate": rate, "num_requests": num_requests})
        workload = generate(name, spec, seed, read_lengths)
        if workload.next_row is None:
            times = workload.arrival_ns
            gaps = [after - before for before, after in zip([0, *times], times, strict=False)]
            gaps[0] = round(sum(gaps) / max(1, len(gaps) - 1))
            workload.arrival_ns = _scaled(gaps, rate)
        return workload

    def _window(self, num_requests: int, rng: np.random.Generator) -> np.ndarray:
        # Repeating rows would repeat their prefixes and make hits that never were.
        assert self.base is not None
        spare = len(self.base) - num_requests
        if spare < 0:
            raise InputError(
                f"{self.base.name}: has {len(self.base)} requests with shared prefixes, which"
                f" cannot be repeated, but a run needs {num_requests}: lower search.requests,"
                " search.verify_factor or the replicas"
            )
        start = int(rng.integers(0, spare + 1))
        return np.arange(start, start + num_requests)

    def _blocks(self, num_requests: int, rng: np.random.Generator) -> np.ndarray:
        assert self.base is not None
        length = min(self.spec.block_requests, len(self.base))
        count = -(-num_requests // length)
        # One start from each of `count` equal parts of the trace: every run sees all of its hours,
        # so that seeds differ less; the order of the stretches is drawn as well.
        width = (len(self.base) - length + 1) / count
        starts = np.floor((np.arange(count) + rng.random(count)) * width).astype(np.int64)
        starts = rng.permutation(starts)
        rows = (starts[:, None] + np.arange(length)[None, :]).ravel()
        return rows[:num_requests]

    @staticmethod
    def _rows(base: Workload, rows: np.ndarray) -> Workload:
        indices = rows.tolist()
        drawn = Workload(
            base.name,
            array("q"),
            array("q", [base.prompt_tokens[row] for row in indices]),
            array("q", [base.output_tokens[row] for row in indices]),
            parameters=dict(base.parameters),
        )
        if base.hashed is not None:
            drawn.hashed = base.hashed.from_row(indices[0], indices[-1])
        return drawn

    def _gaps(self, base: Workload, rows: np.ndarray, seed: int) -> list[int]:
        spec = self.spec
        if spec.arrivals == "trace":
            times = np.asarray(base.arrival_ns, dtype=np.int64)
            before = np.concatenate([times[:1], times[:-1]])
            gaps = times - before
            gaps[0] = round(float(gaps.mean()))  # the first row has no gap of its own
            drawn: list[int] = gaps[rows].tolist()
        else:
            rng = np.random.default_rng((seed, 11))
            times_ns = draw_arrivals(spec.arrivals, 1.0, len(rows) + 1, rng, spec.burstiness)
            drawn = np.diff(np.asarray(times_ns)).tolist()
        if sum(drawn) <= 0:
            raise InputError(f"{base.name}: spans no time; set workload.arrivals to poisson")
        return drawn


def _scaled(gaps: list[int], rate: float) -> array[int]:
    """Arrival times whose last one is exactly `len(gaps) / rate` seconds."""
    factor = len(gaps) / rate * 1e9 / sum(gaps)
    return array("q", [round(total * factor) for total in accumulate(gaps)])


def load_source(spec: WorkloadSpec) -> Source:
    """Reads a trace once, or makes a generator ready.

    Raises:
        ConfigError, InputError: the trace is unreadable or wrong, or a parameter is impossible.
    """
    if spec.trace is None:
        source = Source(spec, None, "")
        source.draw(1.0, 2, 0)  # complains about impossible parameters
        return source
    if is_servegen(spec.trace):
        options = ServeGenOptions(
            spec.window_start_s, spec.window_length_s or 600, num_requests=spec.num_requests
        )
        base = read_servegen(spec.trace, options)
    else:
        # Arrival times that a trace lacks are drawn later, for each run.
        rate = None if spec.arrivals == "trace" else 1.0
        rows = TraceOptions(
            num_requests=spec.num_requests,
            rate=rate,
            window_start_s=spec.window_start_s,
            window_length_s=spec.window_length_s,
        )
        base = read_trace(spec.trace, rows)
        if base.next_row is not None or base.texts is not None:
            raise InputError(
                f"{spec.trace}: holds texts or turns that wait; no study draws from those"
            )
    return Source(spec, base, _digest(spec.trace))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
