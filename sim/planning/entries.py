"""What is known about each configuration, and how configurations are ranked."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sim.cost.calibrated import MAX_OUTSIDE
from sim.planning.capacity import Interval, SeedCapacity, interval_of
from sim.planning.confirm import Confirmation
from sim.planning.space import Candidate
from sim.planning.study import Study
from sim.planning.trial import TrialResult
from sim.planning.usage import bottleneck


@dataclass(slots=True)
class Entry:
    """A configuration and everything that its runs have shown.

    `at_rate` are runs at the objective's rate, `curve` runs that only the plots need; `failure`
    says why there is no answer. `uncertain` ones serve the rate in the runs at it, but their
    capacity is not above it for sure. `hint` is a guess of the capacity. `searched` is the capacity
    of the first search, if long runs have contradicted it and `seeds` are theirs. The runs of the
    first search had at least `stretch` times as many requests as the study asks for.
    """

    candidate: Candidate
    seeds: list[SeedCapacity] = field(default_factory=list)
    at_rate: list[TrialResult] = field(default_factory=list)
    curve: list[TrialResult] = field(default_factory=list)
    failure: str | None = None
    uncertain: bool = False
    hint: float | None = None
    searched: float | None = None
    stretch: float = 1.0
    confirmation: Confirmation | None = None
    notes: list[str] = field(default_factory=list)

    def become(self, again: Entry) -> None:
        """Takes over what was found when it was run again with other costs."""
        self.candidate, self.failure = again.candidate, again.failure
        self.seeds, self.at_rate = again.seeds, again.at_rate
        self.notes += again.notes

    @property
    def rates(self) -> list[float]:
        """Capacity of each seed that has one."""
        return [seed.rate for seed in self.seeds if seed.rate is not None]

    @property
    def capacity(self) -> float | None:
        """Mean capacity over the seeds; None unless every seed has one."""
        rates = self.rates
        return statistics.fmean(rates) if rates and len(rates) == len(self.seeds) else None

    def interval(self, study: Study) -> Interval | None:
        """Interval of the capacity; None for a configuration seen with one seed only."""
        rates = self.rates
        if len(rates) < 2 or len(rates) < len(self.seeds):
            return None
        return interval_of(rates, study.search.confidence, study.search.tolerance)

    @property
    def unsteady(self) -> TrialResult | None:
        """A run at the capacity that was too short for its slowest process, if one was."""
        short = (run for run in self.runs_at_capacity() if not run.steady)
        return max(short, key=lambda run: run.scale_s, default=None)

    def scores(self, study: Study) -> list[float]:
        """What it is ranked by, for each seed."""
        mean = self.capacity
        return [] if mean is None else [score(self, study) / mean * rate for rate in self.rates]

    def runs_at_capacity(self) -> list[TrialResult]:
        """Of each seed the run at the highest rate that met the SLO, or those at the rate."""
        found = [seed.tested[seed.low] for seed in self.seeds if seed.low is not None]
        return found or self.at_rate

    @property
    def guessed(self) -> float:
        """Largest share of a run's steps at the capacity outside the range of its cost model."""
        return max((run.outside for run in self.runs_at_capacity()), default=0.0)

    @property
    def guesses(self) -> bool:
        """Whether that share is too large for an answer."""
        return self.guessed > MAX_OUTSIDE

    def refuse_guesses(self) -> None:
        """Fails a configuration whose runs left the range that its cost model was fitted in."""
        if self.guesses and self.failure is None:
            self.failure = (
                f"{self.guessed:.1%} of the steps at its capacity lie outside the calibrated range,"
                f" at most {MAX_OUTSIDE:.0%} may; use another cost model, such as roofline, or auto"
            )

    def complete_runs(self) -> list[TrialResult]:
        """All runs at some rate that were not stopped early."""
        runs = [run for seed in self.seeds for run in seed.tested.values()]
        return [run for run in (*runs, *self.at_rate, *self.curve) if not run.stopped]

    @property
    def answered(self) -> bool:
        """Whether it has a capacity and has not failed."""
        return self.failure is None and self.capacity is not None

    @property
    def is_checked(self) -> bool:
        """Whether its present capacity has met long runs with fresh seeds."""
        return self.confirmation is not None and self.confirmation.capacity == self.capacity

    @property
    def serves(self) -> bool:
        """Whether all runs at the objective's rate met the SLO, and nothing speaks against it."""
        if self.failure is not None or self.uncertain or not self.at_rate:
            return False
        return all(result.met for result in self.at_rate)

    def goodput(self) -> float | None:
        """Requests per second within every limit, at the capacity."""
        capacity, runs = self.capacity, self.runs_at_capacity()
        if capacity is None or not runs:
            return None
        return capacity * statistics.fmean([run.good_share or 0.0 for run in runs])

    def closest(self) -> TrialResult | None:
        """The run nearest to the SLO among those that missed it all."""
        runs = [run for seed in self.seeds if (run := seed.closest()) is not None]
        runs += [run for run in self.at_rate if run.worst is not None]
        return min(runs, key=lambda run: run.worst or math.inf, default=None)

    def mean_latencies_ms(self) -> dict[str, float]:
        """Latencies at the capacity, averaged over the seeds."""
        return _means([run.latencies_ms for run in self.runs_at_capacity()])

    def mean_usage(self) -> dict[str, float]:
        """Use of the servers at the capacity, averaged over the seeds."""
        return _means([run.usage for run in self.runs_at_capacity()])

    def limited_by(self) -> tuple[str, str, str]:
        """The SLO limit that gives way first, the limiting resource, and why."""
        usage = self.mean_usage()
        missed = [seed.tested[seed.high] for seed in self.seeds if seed.high is not None]
        names = [run.binding for run in missed or self.at_rate if run.binding]
        limit = max(sorted(set(names)), key=names.count, default="")
        resource, why = bottleneck(usage) if usage else ("", "")
        return limit, resource, why

    def cost_per_million_tokens(self, study: Study, rate: float | None) -> float | None:
        """Price of a million output tokens at a rate (default: the capacity)."""
        price = self.candidate.price_per_hour(study.prices)
        runs = self.runs_at_capacity()
        rate = rate or self.capacity
        if price is None or not runs or rate is None:
            return None
        per_request = statistics.fmean(
            [run.output_tokens_per_s / run.throughput for run in runs if run.throughput]
        )
        return price / 3600 / (rate * per_request) * 1e6


def score(entry: Entry, study: Study) -> float:
    """Larger is better; configurations without a capacity come last, nearest first."""
    capacity = entry.capacity
    if entry.failure is not None:
        return -math.inf
    if capacity is None:
        closest = entry.closest()
        return -(closest.worst or math.inf) if closest is not None else -math.inf
    if study.objective.kind == "max_rate":
        return capacity
    gpus = entry.candidate.num_gpus()
    if study.objective.kind == "min_cost":
        price = entry.candidate.price_per_hour(study.prices)
        return capacity / (price or gpus)
    return (entry.goodput() or 0.0) / gpus


def ranked(entries: Sequence[Entry], study: Study) -> list[Entry]:
    """Best first; equals keep the order of the study.

    For `min_cost` those that serve the rate come first, cheapest first and of equal price the one
    with most room; the others follow by capacity for the money.
    """

    def key(entry: Entry) -> tuple[float, ...]:
        refined = len(entry.seeds) > 1
        if study.objective.kind == "min_cost" and entry.serves:
            price = entry.candidate.price_per_hour(study.prices) or 0.0
            worst = statistics.fmean([run.worst or 0.0 for run in entry.at_rate])
            return (0, price, -(entry.capacity or 0.0) if refined else 0.0, worst)
        return (1, 0.0 if refined else 1.0, -score(entry, study), 0.0)

    return sorted(entries, key=key)


def _means(columns: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Mean of each figure that all runs know."""
    means = {}
    for name in columns[0] if columns else ():
        values = [column[name] for column in columns if column.get(name) is not None]
        if len(values) == len(columns):
            means[name] = statistics.fmean([value for value in values if value is not None])
    return means
