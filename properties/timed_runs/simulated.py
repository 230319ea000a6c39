"""Checks of single simulated runs: the clock, sums over time, metrics, parity with the kernel."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import pairwise

from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.tokens import Prompt
from properties.follower.view import LawBroken
from properties.timed_runs.relations import SKIP, causality, oracle_boundary
from properties.timed_runs.timed import Case, Job, Recorder, Timed, simulate
from sim.metrics.summary import request_times


def _require(holds: bool, law: str, detail: str) -> None:
    if not holds:
        raise LawBroken(law, detail)


def clock(run: Timed) -> None:
    """LAW-M1: steps follow one another in time and take time."""
    for step in run.steps:
        _require(step.duration >= 1 and step.start >= 0, "M1", f"step at {step.start}")
    for before, after in pairwise(run.steps):
        _require(after.start >= before.end, "M1", f"a step starts at {after.start} < {before.end}")


def repeatable(case: Case) -> None:
    """LAW-M2: two runs in one process are equal, byte for byte."""
    one, other = simulate(case), simulate(case)
    _require(repr(one.steps) == repr(other.steps), "M2", "two runs differ")
    _require(one.ledger.finish_ns == other.ledger.finish_ns, "M2", "two runs end differently")


def little(run: Timed) -> None:
    """LAW-M3: the sum of the times in the system is the integral of their number, exactly."""
    total = sum(run.e2e.values())
    area = run.ledger.in_system.area_ns
    _require(total == area, "M3", f"sojourns sum to {total}, N(t) integrates to {area}")
    waits = sum(times.queue_ns + times.preempted_ns for times in request_times(run.ledger))
    queued = run.ledger.in_queue.area_ns
    _require(waits == queued, "M3", f"waits sum to {waits}, the queue integrates to {queued}")


def _token_times(run: Timed) -> dict[str, list[int]]:
    times: dict[str, list[int]] = {job.name: [] for job in run.case.jobs}
    for step in run.steps:
        for entry in step.entries:
            if entry.samples:
                times[str(entry.request_id)].append(step.end)
    return times


def gaps_add_up(run: Timed) -> None:
    """LAW-M4: e2e = TTFT + the gaps between tokens; every token of the request is there once."""
    for job in run.case.jobs:
        times = _token_times(run)[job.name]
        gaps = sum(after - before for before, after in pairwise(times))
        e2e, ttft = run.e2e[job.name], run.ttft[job.name]
        _require(len(times) == job.outputs, "M4", f"{job.name} has {len(times)} tokens")
        _require(e2e == ttft + gaps, "M4", f"{job.name}: e2e {e2e}, TTFT {ttft}, gaps {gaps}")


def busy(run: Timed) -> None:
    """LAW-M5: no idle server while somebody is there, and no more busy time than makespan."""
    total = sum(step.duration for step in run.steps)
    _require(total <= run.makespan, "M5", f"busy {total}, makespan {run.makespan}")
    ends = {name: run.e2e[name] for name in run.e2e}
    for before, after in pairwise(run.steps):
        if after.start == before.end:
            continue
        for job in run.case.jobs:
            there = job.arrival < after.start and job.arrival + ends[job.name] > before.end
            _require(not there, "M5", f"idle at {before.end} while {job.name} is there")


def kernel_parity(run: Timed) -> None:
    """LAW-M6: the kernel, fed with the same arrivals by hand, decides the same step by step."""
    scheduler = Scheduler(run.case.config)
    arrivals = deque(run.case.jobs)
    for number, step in enumerate(run.steps):
        while arrivals and arrivals[0].arrival <= step.start:
            job = arrivals.popleft()
            scheduler.add(Request(job.name, Prompt(job.prompt), job.outputs))
        plan = scheduler.schedule()
        # The simulator's output ids are unique; any ids that are unique too give the same hits.
        tokens = [
            10_000 + 1000 * list(run.e2e).index(str(name)) + scheduler.num_tokens(name)
            for name in plan.sampled_ids
        ]
        outcome = scheduler.commit(plan, tokens)
        finished = tuple([ended.request_id for ended in outcome.finished])
        ours = (tuple(plan.entries), plan.new_blocks, plan.preempted, finished)
        _require(ours == step.decision, "M6", f"step {number}: {ours}, simulated {step.decision}")
    _require(not scheduler.has_work, "M6", "the simulated run ends early")


def online_metrics(run: Timed) -> None:
    """LAW-M7: the ledger's times equal those recomputed from the steps."""
    tokens = _token_times(run)
    for row, job in enumerate(run.case.jobs):
        first = next(s.start for s in run.steps if any(e.request_id == job.name for e in s.entries))
        times = (first, tokens[job.name][0], tokens[job.name][-1])
        ledger = run.ledger
        booked = (
            ledger.first_scheduled_ns[row],
            ledger.first_token_ns[row],
            ledger.finish_ns[row],
        )
        _require(times == booked, "M7", f"{job.name}: booked {booked}, from the steps {times}")
    preempted = sum(len(step.preempted) for step in run.steps)
    _require(preempted == run.preemptions, "M7", f"{run.preemptions} preemptions, {preempted}")


def causal(case: Case) -> None:
    """LAW-M8: the future changes nothing."""
    told = causality(case)
    _require(told in (None, SKIP), "M8", str(told))


def blind(case: Case) -> None:
    """LAW-M9: nobody knows how long an output will be."""
    told = oracle_boundary(case)
    _require(told in (None, SKIP), "M9", str(told))


def exported(recorder: Recorder, run: Timed) -> Case:
    """The case that a run's own log describes."""
    outputs = {job.name: len(_token_times(run)[job.name]) for job in run.case.jobs}
    jobs = [
        Job(
            str(request.request_id),
            arrival,
            tuple(request.prompt),
            outputs[str(request.request_id)],
        )
        for request, arrival, _ in recorder.added
    ]
    return replace(run.case, jobs=tuple(jobs))


def replay_parity(case: Case) -> None:
    """LAW-M10: a run that is exported from its log and replayed gives the same result."""
    recorder = Recorder()
    run = simulate(case, recorder=recorder)
    again = simulate(exported(recorder, run))
    _require(repr(run.steps) == repr(again.steps), "M10", "the replay differs")
    _require(run.e2e == again.e2e, "M10", f"{run.e2e} became {again.e2e}")


RUN_CHECKS = (clock, little, gaps_add_up, busy, kernel_parity, online_metrics)
CASE_CHECKS = (repeatable, causal, blind, replay_parity)
