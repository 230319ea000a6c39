"""Tiny timed runs on the real simulator, for laws that relate one run to another.

A step costs overhead + tokens + batch size in whole time units. Every decision of a run is kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

from engine.core.config import KernelConfig
from engine.core.plan import Entry, NewBlocks
from engine.core.request import Request, RequestId
from engine.steplog.api import AddRecord, DecodeRunEvent, StepEvent
from properties.follower.view import LawBroken
from sim.cluster.router import make_router
from sim.cluster.simulation import RunOptions, Simulation
from sim.cost.features import CostModel, StepFeatures
from sim.cost.physics import Physics
from sim.metrics.requests import COMPLETED, Ledger
from sim.specs.hardware import hardware_named
from sim.specs.models import model_named
from sim.workloads.table import HashedPrefixes, Workload

# Far beyond any case: a scheduler that never finishes must not run for ever.
MAX_STEPS = 5_000


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a case; `name` survives the removal of others."""

    name: str
    arrival: int
    prompt: tuple[int, ...]
    outputs: int


@dataclass(frozen=True, slots=True)
class Case:
    """Jobs in order of arrival, a kernel and the fixed cost of a step."""

    jobs: tuple[Job, ...]
    config: KernelConfig
    overhead: int = 5
    scale: int = 1


class UnitCost:
    """overhead + tokens + batch size, times the scale."""

    name = "unit"
    physical = False

    def __init__(self, overhead: int, scale: int = 1) -> None:
        self.overhead, self.scale = overhead, scale

    def step_time_ns(self, features: StepFeatures) -> int:
        """Duration of one step."""
        return (self.overhead + features.num_tokens + features.num_seqs) * self.scale

    def decode_run_ns(
        self, num_rows: int, context_sum: int, steps: int, kv_shared_tokens: int = 0
    ) -> list[int]:
        """Durations of consecutive pure decode steps."""
        return [(self.overhead + 2 * num_rows) * self.scale] * steps

    def describe(self) -> dict[str, object]:
        """Name and parameters."""
        return {"name": self.name, "overhead": self.overhead, "scale": self.scale}


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One step as it happened."""

    start: int
    duration: int
    entries: tuple[Entry, ...]
    new_blocks: tuple[NewBlocks, ...]
    preempted: tuple[RequestId, ...]
    finished: tuple[RequestId, ...]

    @property
    def end(self) -> int:
        """When its results were there."""
        return self.start + self.duration

    @property
    def decision(self) -> tuple[object, ...]:
        """What the kernel decided, without the time."""
        return (self.entries, self.new_blocks, self.preempted, self.finished)


@dataclass(slots=True)
class Recorder:
    """A step log that keeps everything in memory."""

    added: list[tuple[Request, int, int]] = field(default_factory=list)  # arrival, added at
    steps: list[TimedStep] = field(default_factory=list)

    def _keep(self, step: TimedStep) -> None:
        if len(self.steps) == MAX_STEPS:
            raise LawBroken("L3", f"{MAX_STEPS} steps did not end a case of a few requests")
        self.steps.append(step)

    def add(self, record: AddRecord) -> None:
        """A request was accepted."""
        self.added.append((record.request, record.arrival_ns, record.added_ns))

    def step(self, event: StepEvent) -> None:
        """A step was committed."""
        plan = event.plan
        finished = tuple([ended.request_id for ended in event.outcome.finished])
        self._keep(
            TimedStep(
                event.start_ns,
                event.duration_ns,
                tuple(plan.entries),
                plan.new_blocks,
                plan.preempted,
                finished,
            )
        )

    def decode_run(self, event: DecodeRunEvent) -> None:
        """A stretch of decode steps was committed; it is written out step by step."""
        plan, run, durations_ns = event.plan, event.run, event.durations_ns
        for offset in range(run.num_steps):
            blocks = tuple([new for at, new in run.new_blocks if at == offset])
            moved = replace(plan, clock=plan.clock + offset)
            last = offset + 1 == run.num_steps
            finished = tuple([ended.request_id for ended in run.outcome.finished]) if last else ()
            preempted = plan.preempted if offset == 0 else ()
            self._keep(
                TimedStep(
                    event.start_ns + sum(durations_ns[:offset]),
                    durations_ns[offset],
                    tuple(moved.entries),
                    blocks,
                    preempted,
                    finished,
                )
            )


@dataclass(frozen=True, slots=True)
class Timed:
    """The result of a run."""

    case: Case
    steps: tuple[TimedStep, ...]
    e2e: dict[str, int]
    ttft: dict[str, int]
    makespan: int
    preemptions: int
    hit_tokens: int
    ledger: Ledger

    @property
    def computed(self) -> int:
        """Tokens over all steps."""
        return sum(entry.num_tokens for step in self.steps for entry in step.entries)

    @property
    def decisions(self) -> list[tuple[object, ...]]:
        """All decisions without times."""
        return [step.decision for step in self.steps]


@cache
def _physics() -> Physics:
    return Physics(model_named("smollm2-135m"), hardware_named("l4"))


def workload_of(jobs: Sequence[Job]) -> Workload:
    """The simulator's table; hash ids of one token each stand for the tokens themselves."""
    offsets, ids = array("q", [0]), array("q")
    for job in jobs:
        ids.extend(job.prompt)
        offsets.append(len(ids))
    return Workload(
        "case",
        array("q", [job.arrival for job in jobs]),
        array("q", [len(job.prompt) for job in jobs]),
        array("q", [job.outputs for job in jobs]),
        request_ids=[job.name for job in jobs],
        hashed=HashedPrefixes(1, ids, offsets),
    )


def simulate(
    case: Case,
    cost: CostModel | None = None,
    step_by_step: bool = False,
    recorder: Recorder | None = None,
) -> Timed:
    """Runs a case once; `recorder` receives the log."""
    recorder = recorder or Recorder()
    simulation = Simulation(
        workload_of(case.jobs),
        case.config,
        (cost or UnitCost(case.overhead, case.scale),),
        _physics(),
        make_router("round-robin"),
        RunOptions(on_oversize="error", step_by_step=step_by_step),
        recorder,
    )
    result = simulation.run()
    ledger = result.ledger
    assert all(status == COMPLETED for status in ledger.status)
    rows = list(enumerate(case.jobs))
    return Timed(
        case,
        tuple(recorder.steps),
        {job.name: ledger.finish_ns[row] - ledger.arrival_ns[row] for row, job in rows},
        {job.name: ledger.first_token_ns[row] - ledger.arrival_ns[row] for row, job in rows},
        result.end_ns,
        sum(ledger.preemptions),
        sum(ledger.hit_tokens),
        ledger,
    )


def random_case(seed: int, policy: str) -> Case:
    """2 to 6 jobs, blocks of 2, pools of 5 to 12, as the first measurement of the anomalies had."""
    rng = Random(seed)
    blocks = rng.randint(5, 12)
    longest = blocks * 2
    jobs = []
    arrival = 0
    for place in range(rng.randint(2, 6)):
        if rng.random() < 0.5:
            arrival += rng.randint(0, 40)
        length = rng.randint(1, min(10, longest - 2))
        shared = rng.choice((0, 0, 2, 4, 6))
        prompt = [1 + t for t in range(min(shared, length))]
        prompt += [100 * (place + 1) + t for t in range(length - len(prompt))]
        outputs = rng.randint(1, min(8, longest - length))
        jobs.append(Job(f"r{place}", arrival, tuple(prompt), outputs))
    config = KernelConfig(
        num_blocks=blocks,
        max_model_len=64,
        block_size=2,
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.choice((4, 6, 8, 12, 16)),
        policy=policy,
    )
    return Case(tuple(jobs), config, overhead=rng.choice((1, 5, 20)))
