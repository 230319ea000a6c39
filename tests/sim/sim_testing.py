"""Small workloads and runs for the simulator's tests."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from places import SHARED

from engine.core import KernelConfig
from engine.steplog.api import StepLogWriter
from sim.cluster.simulation import RunOptions
from sim.cost.features import CostModel
from sim.cost.simple import ConstantCost
from sim.metrics.requests import COMPLETED
from sim.run.deployment import Deployment, build
from sim.run.outputs import request_rows
from sim.run.run import Run, RunPlan, log_header, run_plan
from sim.workloads.generators import generate, preset
from sim.workloads.table import Workload

MS = 1_000_000
TRACES = SHARED / "traces"
needs_shared = pytest.mark.skipif(not TRACES.is_dir(), reason="the recordings are not here")


def rows_workload(*rows: tuple[float, int, int]) -> Workload:
    """Requests of (arrival in ms, prompt tokens, output tokens)."""
    return Workload(
        "rows",
        array("q", [round(row[0] * MS) for row in rows]),
        array("q", [row[1] for row in rows]),
        array("q", [row[2] for row in rows]),
    )


def synthetic(name: str = "poisson", seed: int = 0, **changes: object) -> Workload:
    """A named synthetic workload."""
    return generate(name, preset(name, **changes), seed)


def deployment(**changes: object) -> Deployment:
    """A small deployment with roofline costs."""
    base = Deployment(
        model="smollm2-135m", hardware="l4", cost="roofline", num_kv_blocks=4096,
        max_model_len=8192,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def run(
    workload: Workload,
    *,
    options: RunOptions | None = None,
    slos_ms: dict[str, float] | None = None,
    seed: int = 0,
    log_path: Path | None = None,
    costs: tuple[CostModel, ...] | None = None,
    kernel: dict[str, object] | None = None,
    **changes: object,
) -> Run:
    """Simulates a workload; `costs` and fields of `kernel` replace what the names would give."""
    plan = RunPlan(workload, deployment(**changes), options or RunOptions(), slos_ms or {}, seed)
    parts = build(plan.deployment, seed)
    if costs is not None:
        parts = replace(parts, costs=costs)
    if kernel is not None:
        parts = replace(parts, kernel=replace(parts.kernel, **kernel))  # type: ignore[arg-type]
    if log_path is None:
        return run_plan(plan, parts)
    with StepLogWriter(log_path, log_header(plan, parts)) as log:
        return run_plan(plan, parts, log)


def constant(ms: float, replicas: int = 1) -> tuple[CostModel, ...]:
    """Every step takes that long."""
    return tuple(ConstantCost(round(ms * MS)) for _ in range(replicas))


def ours(finished: Run) -> dict[str, Any]:
    """The part of summary.json that vLLM does not have."""
    return finished.summary.sim.to_json()


def table(finished: Run) -> list[list[object]]:
    """The rows of requests.csv."""
    return [list(row) for row in request_rows(finished)]


def completed_rows(finished: Run) -> list[int]:
    """Rows of the workload that completed."""
    return [row for row, status in enumerate(finished.result.ledger.status) if status == COMPLETED]


__all__ = [
    "MS",
    "SHARED",
    "TRACES",
    "KernelConfig",
    "completed_rows",
    "constant",
    "deployment",
    "needs_shared",
    "ours",
    "rows_workload",
    "run",
    "synthetic",
    "table",
]
