"""One run of a search: what is run, what comes back, and how it is carried out."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from engine.core.errors import LockstepError
from sim.cluster.fleet import FleetSimulation
from sim.cluster.prefill_decode import KvLink
from sim.cluster.router import make_router
from sim.cluster.server import Server
from sim.metrics.requests import Ledger
from sim.metrics.stability import is_stable
from sim.metrics.steady import TimeScale, longest_scale, span_ns, thinking_ns
from sim.planning.judge import Judge
from sim.planning.sampling import Source
from sim.planning.space import Candidate
from sim.planning.study import ON_OVERSIZE, Slo
from sim.planning.usage import usage_of
from sim.run.deployment import num_extrapolated
from sim.workloads.table import Workload

_CHECKS_PER_RUN = 64


@dataclass(frozen=True, slots=True)
class Trial:
    """One run. `rate` None sends all requests at once, to find the saturated throughput.

    `num_requests` is the least; a run has up to `most_requests` where it takes them to last for
    `multiple` times its slowest process.
    """

    candidate: Candidate
    rate: float | None
    seed: int
    num_requests: int
    slo: Slo
    link: KvLink
    warmup: float
    cooldown: float
    early_stop: bool = True
    multiple: float = 0.0
    most_requests: int = 0


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What a run showed; plain numbers, so that it can be kept as JSON.

    A run that was `stopped` early is certain to miss `binding`; its latencies and goodput are
    unknown. `worst` is the largest ratio of a latency to its limit, `outside` the share of steps
    outside the range of the cost model. Of the `num_requests` the first `warmup_requests` were cut.
    `steady` is False if even the longest run was too short for `scale_s`, the length of its slowest
    process, `scale`. `error` is set if the run failed, and then nothing else holds.
    """

    rate: float | None
    seed: int
    num_requests: int
    met: bool = False
    stable: bool = True
    stopped: bool = False
    binding: str = ""
    worst: float | None = None
    latencies_ms: Mapping[str, float | None] = field(default_factory=dict)
    good_share: float | None = None
    goodput: float | None = None
    throughput: float = 0.0
    output_tokens_per_s: float = 0.0
    span_s: float = 0.0
    rejected: int = 0
    outside: float = 0.0
    warmup_requests: int = 0
    steady: bool = True
    scale: str = ""
    scale_s: float = 0.0
    usage: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None


class _Enough(Exception):
    """Ends a run whose verdict is known."""


class Worker:
    """Carries out trials on a loaded source."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def run(self, trial: Trial) -> TrialResult:
        """Runs a trial; whatever goes wrong inside is reported in the result."""
        try:
            return self._run(trial)
        except (LockstepError, MemoryError, AssertionError) as error:
            return self.failed(trial, " ".join(f"{type(error).__name__}: {error}".split()))

    def failed(self, trial: Trial, text: str) -> TrialResult:
        """The result of a trial that did not come to its end."""
        return TrialResult(trial.rate, trial.seed, trial.num_requests, error=text)

    def _run(self, trial: Trial) -> TrialResult:
        """Runs longer and longer until the run lasts long enough, or is the longest."""
        count, most = trial.num_requests, self._most(trial)
        while True:
            workload = self._draw(trial, count)
            needed_ns = trial.multiple * thinking_ns(workload)
            if trial.rate is None or span_ns(workload) >= needed_ns or count >= most:
                result, scale = self._once(trial, workload)
                if scale is None:
                    return result
                result = replace(result, scale=scale.name, scale_s=scale.seconds)
                needed_ns = trial.multiple * scale.seconds * 1e9
                if span_ns(workload) >= needed_ns:
                    return result
                if count >= most:
                    return replace(result, steady=False)
            # Doubling: most configurations then meet the same requests at the same rate.
            doublings = math.ceil(math.log2(needed_ns / max(1, span_ns(workload))))
            count = min(most, count * 2 ** min(20, max(1, doublings)))

    def _most(self, trial: Trial) -> int:
        base, most = self._source.base, trial.most_requests
        if base is not None and base.hashed is not None:
            most = min(most, len(base))
        return max(trial.num_requests, most)

    def _draw(self, trial: Trial, count: int) -> Workload:
        workload = self._source.draw(trial.rate or 1.0, count, trial.seed)
        if trial.rate is None:
            arrivals = workload.arrival_ns
            workload.arrival_ns = array("q", [min(0, time) for time in arrivals])
            if workload.think_ns is not None:
                workload.think_ns = array("q", [0]) * count
        return workload

    def _once(self, trial: Trial, workload: Workload) -> tuple[TrialResult, TimeScale | None]:
        """A run, and its slowest process where the run tells; that of a miss tells nothing."""
        members = trial.candidate.members(trial.seed)
        miss = self._source.spec.on_oversize == ON_OVERSIZE[0]
        edge = 0.0
        if workload.next_row is not None and trial.multiple:
            # The last sessions go on while no new ones come, the first ones meet too few.
            edge = min(0.25, 1 / trial.multiple)
        judge = Judge(workload, trial.slo, max(edge, trial.warmup), max(edge, trial.cooldown), miss)
        watch = _Watch(judge, trial.early_stop and trial.rate is not None)
        simulation = FleetSimulation(
            workload,
            members,
            make_router(trial.candidate.router),
            make_router(trial.candidate.router),
            trial.link,
            on_progress=watch.look,
        )
        watch.ledger = simulation.ledger
        with suppress(_Enough):
            simulation.run()
        costs = [member.cost for member in members]
        result = _result(trial, watch, simulation.servers, workload, num_extrapolated(costs))
        if trial.rate is None or not trial.multiple or not result.met:
            return result, None
        return result, longest_scale(workload, watch.ledger)


class _Watch:
    """Looks at a running simulation from time to time."""

    def __init__(self, judge: Judge, early_stop: bool) -> None:
        self.judge, self.ledger = judge, Ledger(0)
        self.hopeless: str | None = None
        self._early_stop = early_stop
        self._stride = max(8, judge.num_measured // _CHECKS_PER_RUN)

    def look(self, num_ended: int) -> None:
        """Raises _Enough once nothing that is still to come can change the verdict."""
        if not self._early_stop or num_ended % self._stride:
            return
        now_ns = max(self.ledger.finish_ns)
        self.hopeless = self.judge.hopeless(self.ledger, now_ns)
        if self.hopeless is not None:
            raise _Enough
        if self.judge.num_done(self.ledger) == self.judge.num_measured:
            raise _Enough


def _result(
    trial: Trial, watch: _Watch, servers: list[Server], workload: Workload, num_outside: int
) -> TrialResult:
    ledger = watch.ledger
    end_ns = max(1, max(server.stats.last_end_ns for server in servers))
    seconds = end_ns / 1e9
    completed = [row for row, time in enumerate(ledger.finish_ns) if time >= 0]
    stable = is_stable(ledger, watch.judge.closed_loop)
    common: dict[str, Any] = {
        "rate": trial.rate,
        "seed": trial.seed,
        "num_requests": len(workload),
        "stable": stable,
        "throughput": sum(workload.arrival_ns[row] >= 0 for row in completed) / seconds,
        "output_tokens_per_s": sum(ledger.output_tokens[row] for row in completed) / seconds,
        "span_s": seconds,
        "rejected": sum(ledger.rejections.values()),
        "outside": num_outside / max(1, sum(server.stats.num_steps for server in servers)),
        "usage": usage_of(servers, ledger, end_ns),
    }
    if watch.hopeless is not None:
        return TrialResult(stopped=True, binding=watch.hopeless, **common)
    if trial.multiple:
        watch.judge.cut_warmup(ledger)
    verdict = watch.judge.verdict(ledger, [server.stats.gaps for server in servers])
    return TrialResult(
        met=verdict.met and stable,
        binding="unstable" if verdict.met and not stable else verdict.binding,
        worst=verdict.worst,
        latencies_ms=verdict.latencies_ms,
        good_share=verdict.good_share,
        warmup_requests=watch.judge.first,
        goodput=None if trial.rate is None else verdict.good_share * trial.rate,
        **common,
    )
