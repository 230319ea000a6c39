"""What a kernel's driver tells those who listen to its steps; the step log's writer is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.core.plan import DecodeRun, StepOutcome, StepPlan
from engine.steplog.records import AddRecord


@dataclass(frozen=True, slots=True)
class StepEvent:
    """A committed step; `open_plans` were uncommitted when it was scheduled.

    Times on host and device, and the bucket of a captured graph, are known to the engine only.
    """

    plan: StepPlan
    outcome: StepOutcome
    start_ns: int
    duration_ns: int
    open_plans: int = 0
    replica: int = 0
    host_ns: int | None = None
    device_ns: int | None = None
    graph_bucket: int | None = None


@dataclass(frozen=True, slots=True)
class DecodeRunEvent:
    """A committed decode run that began with `plan`; its steps follow one another without a gap.

    `tokens[i]` are the sampled ids of row i, None where outputs are known from the adds.
    """

    plan: StepPlan
    run: DecodeRun
    start_ns: int
    durations_ns: Sequence[int]
    tokens: Sequence[Sequence[int]] | None = None
    graph_bucket: int | None = None
    replica: int = 0


class StepListener(Protocol):
    """Told of every request that a kernel accepts and of every step that it commits."""

    def add(self, record: AddRecord) -> None:
        """A request was accepted."""
        ...

    def step(self, event: StepEvent) -> None:
        """A step was committed."""
        ...

    def decode_run(self, event: DecodeRunEvent) -> None:
        """Several pure decode steps were committed at once."""
        ...
