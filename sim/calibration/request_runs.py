"""Fits the roofline to requests of a run whose steps nobody recorded.

A request decodes as long as the steps of its life take, and waits for its first token as long as
those before it take. Which steps these are is known from a simulation under the present
parameters; given the steps, times are linear in the parameters. So: simulate, fit, repeat.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import InputError
from engine.steplog.api import AddRecord, DecodeRunEvent, StepEvent
from sim.cluster.router import make_router
from sim.cluster.simulation import RunOptions, Simulation
from sim.cost.expert_parallel import ExpertParallelCost
from sim.cost.features import CostModel, StepFeatures
from sim.cost.roofline import RooflineOptions
from sim.cost.roofline_terms import StepTerms, TermModel, coefficients_of, options_of
from sim.metrics.result import RunResult
from sim.run.deployment import Deployment, build
from sim.workloads.table import Workload

Floats = NDArray[np.float64]

ROUNDS = 10
MIN_REQUESTS = 30
# Relative errors beyond this count less and less: a request that was preempted in the recording
# and not in the simulation says nothing about step times.
TOLERANCE = 0.05
# A coefficient twice its default costs as much as errors of this size in all requests. It decides
# between parameters that no request tells apart.
PRIOR = 0.005
# Of the distance to a round's solution, how much is gone from the second round on.
DAMPING = 0.5
# Waits are weighted as if they were longer by this share of the mean decode time, so that a
# request that hardly waited does not ask for a precision beyond one step.
WAIT_FLOOR, DECODE_FLOOR = 0.5, 0.1


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """What a benchmark log knows of each request, in ns from the first one that was queued."""

    queued_ns: Floats
    first_token_ns: Floats
    last_token_ns: Floats

    @property
    def decode_ns(self) -> Floats:
        """From the first token to the last."""
        return self.last_token_ns - self.first_token_ns

    @property
    def wait_ns(self) -> Floats:
        """From the queue to the first token."""
        return self.first_token_ns - self.queued_ns


@dataclass(frozen=True, slots=True)
class RequestFit:
    """Fitted options and the relative errors (root mean square) of the simulation with them."""

    options: RooflineOptions
    decode_error: float
    wait_error: float
    num_requests: int
    num_rounds: int


def fit_requests(
    workload: Workload,
    deployment: Deployment,
    times: RequestTimes,
    visible: NDArray[np.bool_] | None = None,
) -> RequestFit:
    """The options whose simulation comes nearest to the `visible` requests, by default to all.

    `workload` has the requests in order, lengths of those that are not visible included, since
    they share the batches; `deployment.roofline` is where the search begins.

    Raises:
        InputError: too few requests, or one of them cannot run in this deployment.
    """
    chosen = np.ones(len(workload), bool) if visible is None else visible
    if chosen.sum() < MIN_REQUESTS:
        raise InputError(f"{chosen.sum()} finished requests are too few to fit ({MIN_REQUESTS})")
    sent = replace_arrivals(workload, times)
    options, best = deployment.roofline, None
    default = np.array(coefficients_of(RooflineOptions()))
    for count in range(ROUNDS):
        rows = _simulate(sent, deployment, options)
        now = np.array(coefficients_of(options))
        terms, target, weights = _equations(rows, times, chosen)
        errors = weights * (terms @ now - target)
        half = len(errors) // 2
        found = RequestFit(options, _rms(errors[:half]), _rms(errors[half:]), half, count)
        if best is None or _miss(found) < _miss(best):
            best = found
        solution = _solve(terms * weights[:, None], target * weights, now, default)
        step = DAMPING if count else 1.0
        options = options_of(StepTerms(*(now + step * (solution - now))))
    assert best is not None
    return best


def replace_arrivals(workload: Workload, times: RequestTimes) -> Workload:
    """The workload with each request sent when it was queued, whatever the clock of the trace."""
    queued = np.maximum.accumulate(np.round(times.queued_ns)).astype(np.int64)
    return replace(workload, arrival_ns=array("q", queued.tolist()))


def _miss(fit: RequestFit) -> float:
    return fit.decode_error + fit.wait_error


def _rms(errors: Floats) -> float:
    return float(np.sqrt(np.mean(errors**2)))


def _solve(terms: Floats, target: Floats, now: Floats, default: Floats) -> Floats:
    """Coefficients that explain the targets; those that no request has keep their value."""
    # Only fitting needs scipy: an extra that the help of a verb must not ask for.
    from scipy.optimize import least_squares

    known = np.abs(terms).max(axis=0) > 0
    least = np.where(np.arange(len(now)) < 5, 1.0, 0.0)
    units = default[known]
    prior = PRIOR * np.sqrt(len(target)) * np.eye(known.sum())
    matrix = terms[:, known] * units

    def errors(scaled: Floats) -> Floats:
        return np.concatenate([matrix @ scaled - target, prior @ (scaled - 1)])

    found = least_squares(
        errors,
        np.maximum(now[known], least[known] * (1 + 1e-9) + 1e-9) / units,
        jac=lambda _: np.vstack([matrix, prior]),
        bounds=(least[known] / units, np.inf),
        loss="soft_l1",
        f_scale=TOLERANCE,
    )
    solution = now.copy()
    solution[known] = np.maximum(found.x * units, least[known])
    return solution


# Steps of a simulation ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rows:
    """Per request the sums of step terms while it decoded and while it waited."""

    decode: Floats
    wait: Floats


def _equations(rows: _Rows, times: RequestTimes, chosen: NDArray[np.bool_]) -> tuple[
    Floats, Floats, Floats
]:  # fmt: skip
    """Terms, targets and weights: first of all decode times, then of all waits."""
    decode_ns, wait_ns = times.decode_ns[chosen], times.wait_ns[chosen]
    mean_ns = decode_ns.mean()
    weights = np.concatenate(
        [
            1 / np.maximum(decode_ns, DECODE_FLOOR * mean_ns),
            1 / (wait_ns + WAIT_FLOOR * mean_ns),
        ]
    )
    terms = np.vstack([rows.decode[chosen], rows.wait[chosen]])
    return terms, np.concatenate([decode_ns, wait_ns]), weights


class _TermRecorder:
    """A cost model that also notes the terms of each step."""

    name = "roofline"

    def __init__(self, inner: CostModel, model: TermModel, coefficients: StepTerms) -> None:
        self._inner, self._model, self._coefficients = inner, model, coefficients
        self.terms: list[StepTerms] = []

    def step_time_ns(self, features: StepFeatures) -> int:
        """Duration of one step."""
        time_ns = self._inner.step_time_ns(features)
        self.terms.append(self._terms(features))
        return time_ns

    def describe(self) -> dict[str, object]:
        """That of the cost model."""
        return self._inner.describe()

    def _terms(self, features: StepFeatures) -> StepTerms:
        model = self._model
        if not isinstance(self._inner, ExpertParallelCost):
            return model.local(features).plus(model.experts(features.num_tokens))
        group = self._inner.group
        tokens = [step.num_tokens for step in group.steps]
        slowest = max(
            map(model.local, group.steps), key=lambda one: one.time_ns(self._coefficients)
        )
        shared = model.experts(sum(tokens)).plus(model.exchange(max(tokens), len(group.newest)))
        return slowest.plus(shared)


class _StepTimes:
    """A step log that keeps the times of the steps of each replica."""

    def __init__(self, num_replicas: int) -> None:
        self.start_ns: list[list[int]] = [[] for _ in range(num_replicas)]
        self.duration_ns: list[list[int]] = [[] for _ in range(num_replicas)]

    def add(self, record: AddRecord) -> None:
        """Requests are known already."""

    def step(self, event: StepEvent) -> None:
        """Notes one step; one that was left without work took no time."""
        if not event.plan.num_entries:
            return
        self.start_ns[event.replica].append(event.start_ns)
        self.duration_ns[event.replica].append(event.duration_ns)

    def decode_run(self, event: DecodeRunEvent) -> None:
        """Not called, since the run goes step by step."""
        raise AssertionError("a step-by-step run has no stretches")


def _simulate(workload: Workload, deployment: Deployment, options: RooflineOptions) -> _Rows:
    """Runs the workload and sums up the steps of each request."""
    deployment = replace(deployment, cost="roofline", roofline=options)
    parts = build(deployment, 0)
    model = TermModel(parts.physics, options)
    coefficients = coefficients_of(options)
    costs = [_TermRecorder(cost, model, coefficients) for cost in parts.costs]
    steps = _StepTimes(len(costs))
    simulation = Simulation(
        workload,
        parts.kernel,
        costs,
        parts.physics,
        make_router(deployment.router),
        RunOptions("error", step_by_step=True),
        steps,
    )
    result = simulation.run()
    return _sum_steps(result, [np.array(cost.terms) for cost in costs], steps)


def _sum_steps(result: RunResult, terms: Sequence[Floats], steps: _StepTimes) -> _Rows:
    ledger = result.ledger
    replica = np.array(ledger.replica)
    arrival, first, last = (
        np.array(column) for column in (ledger.arrival_ns, ledger.first_token_ns, ledger.finish_ns)
    )
    num_terms = len(StepTerms._fields)
    decode, wait = np.zeros((len(ledger), num_terms)), np.zeros((len(ledger), num_terms))
    for index, work in enumerate(terms):
        rows = replica == index
        starts, durations = np.array(steps.start_ns[index]), np.array(steps.duration_ns[index])
        ends = starts + durations
        sums = np.vstack([np.zeros(num_terms), np.cumsum(work, axis=0)])
        at_first, at_last = (np.searchsorted(ends, one[rows], "right") for one in (first, last))
        decode[rows] = sums[at_last] - sums[at_first]
        # The step that runs when a request arrives counts as far as it is still to run.
        running = np.searchsorted(ends, arrival[rows], "right")
        gone = np.clip((arrival[rows] - starts[running]) / durations[running], 0.0, 1.0)
        wait[rows] = sums[at_first] - sums[running] - work[running] * gone[:, None]
    return _Rows(decode, wait)
