"""The laws of the simulator, each with a broken simulator that it must notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar
from unittest import mock

from engine.core.request import Request, RequestId
from engine.core.scheduler import Scheduler
from engine.core.waiting import FcfsQueue
from properties.defects.decisions import PreemptsOldest
from properties.follower.view import LawBroken
from properties.laws.registry import SIMULATOR, Law
from properties.search.probes import alarm
from properties.timed_runs import long_runs, simulated
from properties.timed_runs.random_runs import judge_seed
from properties.timed_runs.spoiled import SPOILED, first_noticed
from properties.timed_runs.timed import Case, Timed, UnitCost, random_case, simulate
from sim.cluster.server import Server
from sim.cost.features import StepFeatures
from sim.metrics.requests import Ledger, Population

CASES = 40


class _DriftingCost(UnitCost):
    """Costs that depend on how many steps were ever simulated in this process."""

    steps: ClassVar[int] = 0

    def step_time_ns(self, features: StepFeatures) -> int:
        type(self).steps += 1
        return super().step_time_ns(features) + self.steps % 3

    def decode_run_ns(
        self, num_rows: int, context_sum: int, steps: int, kv_shared_tokens: int = 0
    ) -> list[int]:
        return [self.step_time_ns(StepFeatures(num_rows, context_sum, (), num_rows))] * steps


class _HalfCountingPopulation(Population):
    """Forgets every second area."""

    def change(self, by: int, time_ns: int) -> None:
        before = self.area_ns
        super().change(by, time_ns)
        if by < 0:
            self.area_ns = before


class _LateLedger(Ledger):
    """Books every finish one time unit late."""

    def finished(self, row: int, time_ns: int, output_tokens: int) -> None:
        super().finished(row, time_ns + 1, output_tokens)


class _PeekingScheduler(Scheduler):
    """Puts short outputs first: it reads what only the future tells."""

    def add(self, request: Request) -> None:
        super().add(request)
        waiting = sorted(self.state.waiting, key=lambda sequence: sequence.request.max_tokens)
        self.state.waiting = FcfsQueue(waiting)


def _cases() -> list[Case]:
    return [
        random_case(seed, policy) for seed in range(CASES) for policy in ("mixed", "prefill_first")
    ]


def _first_alarm(check: Callable[..., None], *, of_run: bool) -> LawBroken | None:
    for case in _cases():
        found = alarm(check, simulate(case) if of_run else case)
        if found is not None:
            return found
    return None


def _patched(
    target: str, broken: object, check: Callable[..., None], of_run: bool
) -> LawBroken | None:
    """The first alarm when a part of the simulator is replaced."""
    with mock.patch(target, broken):
        return _first_alarm(check, of_run=of_run)


def _doctored(check: Callable[[Timed], None], change: Callable[[Timed], Timed]) -> LawBroken | None:
    """The first alarm over results that were changed by hand."""
    for case in _cases():
        found = alarm(check, change(simulate(case)))
        if found is not None:
            return found
    return None


def _overlapping(run: Timed) -> Timed:
    steps = [replace(step, start=step.start - 1) if i else step for i, step in enumerate(run.steps)]
    return replace(run, steps=tuple(steps))


def _with_a_pause(run: Timed) -> Timed:
    steps = [replace(step, start=step.start + 3) if i else step for i, step in enumerate(run.steps)]
    return replace(run, steps=tuple(steps), makespan=run.makespan + 3)


def _clairvoyant(case: Case) -> None:
    """Costs that know how many requests will ever come."""

    def knowing(other: Case, **options: object) -> Timed:
        cost = UnitCost(other.overhead + len(other.jobs), other.scale)
        return simulate(other, cost)

    with mock.patch("properties.timed_runs.relations.simulate", knowing):
        simulated.causal(case)


def _rounded(case: Case) -> None:
    """An export that rounds arrivals."""

    def rounding(recorder: object, run: Timed) -> Case:
        jobs = [replace(job, arrival=job.arrival // 10 * 10) for job in run.case.jobs]
        return replace(run.case, jobs=tuple(jobs))

    with mock.patch("properties.timed_runs.simulated.exported", rounding):
        simulated.replay_parity(case)


def _spoiled_figure() -> LawBroken | None:
    """What is said about the first of the planted defects; a test plants all."""
    found = first_noticed(SPOILED[0], judge_seed, range(9))
    return found[1] if found is not None and isinstance(found[1], LawBroken) else None


class _HoardingServer(Server):
    """Keeps what it knew of requests that have ended."""

    def _forget(self, request_id: RequestId, num_outputs: int) -> int:
        live = self._live[request_id]
        row = super()._forget(request_id, num_outputs)
        self._live[request_id] = live
        return row


def _hoard() -> LawBroken | None:
    with mock.patch("sim.cluster.simulation.Server", _HoardingServer):
        return alarm(long_runs.long_runs, 1)


_S = "properties.timed_runs.simulated"
_R = "properties.timed_runs.relations"

SIMULATOR_LAWS: tuple[Law, ...] = (
    Law(
        "M1",
        "The clock never goes back; steps follow one another.",
        SIMULATOR,
        (f"{_S}:clock",),
        partial(_doctored, simulated.clock, _overlapping),
        "a step that starts before the last one ended",
    ),
    Law(
        "M2",
        "Equal inputs give equal runs, also twice in one process.",
        SIMULATOR,
        (f"{_S}:repeatable",),
        partial(
            _patched,
            "properties.timed_runs.timed.UnitCost",
            _DriftingCost,
            simulated.repeatable,
            False,
        ),
        "a cost model with state on its class",
    ),
    Law(
        "M3",
        "The sum of times in system and queue equals the integral of their numbers, exactly.",
        SIMULATOR,
        (f"{_S}:little",),
        partial(
            _patched,
            "sim.metrics.requests.Population",
            _HalfCountingPopulation,
            simulated.little,
            True,
        ),
        "an integral that forgets departures",
    ),
    Law(
        "M4",
        "e2e = TTFT + gaps between tokens, and every token is counted once.",
        SIMULATOR,
        (f"{_S}:gaps_add_up",),
        partial(
            _patched, "sim.cluster.simulation.Ledger", _LateLedger, simulated.gaps_add_up, True
        ),
        "a ledger that books finishes late",
    ),
    Law(
        "M5",
        "A server is never idle while somebody is there; busy time is at most the makespan.",
        SIMULATOR,
        (f"{_S}:busy",),
        partial(_doctored, simulated.busy, _with_a_pause),
        "a pause after the first step",
    ),
    Law(
        "M6",
        "The simulator's decisions are the kernel's, step by step.",
        SIMULATOR,
        (f"{_S}:kernel_parity",),
        partial(
            _patched, "sim.cluster.server.Scheduler", PreemptsOldest, simulated.kernel_parity, True
        ),
        "PreemptsOldest inside the simulator",
    ),
    Law(
        "M7",
        "Metrics kept on the way equal those recomputed from the steps.",
        SIMULATOR,
        (f"{_S}:online_metrics",),
        partial(
            _patched, "sim.cluster.simulation.Ledger", _LateLedger, simulated.online_metrics, True
        ),
        "a ledger that books finishes late",
    ),
    Law(
        "M8",
        "An arrival changes nothing that was decided before it.",
        SIMULATOR,
        (f"{_S}:causal", f"{_R}:causality"),
        partial(_first_alarm, _clairvoyant, of_run=False),
        "costs that know how many requests will come",
    ),
    Law(
        "M9",
        "No decision depends on the length of an output before it has ended.",
        SIMULATOR,
        (f"{_S}:blind", f"{_R}:oracle_boundary"),
        partial(
            _patched, "sim.cluster.server.Scheduler", _PeekingScheduler, simulated.blind, False
        ),
        "a scheduler that sorts by output length",
    ),
    Law(
        "M10",
        "A run exported from its log and replayed gives the same result.",
        SIMULATOR,
        (f"{_S}:replay_parity",),
        partial(_first_alarm, _rounded, of_run=False),
        "an export that rounds arrivals",
    ),
    Law(
        "M11",
        "Every figure of a summary equals the one that its step log and its requests give.",
        SIMULATOR,
        ("properties.timed_runs.random_runs:every_figure",),
        _spoiled_figure,
        "a TPOT that divides by all output tokens, and the others of [mutants.md](mutants.md)",
    ),
    Law(
        "M12",
        "What a server keeps is bounded by its live requests, not by those that it has served.",
        SIMULATOR,
        ("properties.timed_runs.long_runs:few_things_kept",),
        _hoard,
        "a server that keeps what it knew of the ended",
    ),
)
