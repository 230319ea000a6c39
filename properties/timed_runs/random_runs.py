"""Random whole runs of the simulator in all policies and modes, with log and summary."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from engine.core.config import KernelConfig
from engine.steplog.api import ExpandedRecord, StepLogReader, StepLogWriter
from properties.timed_runs.facts import Facts, compare
from properties.timed_runs.recomputed import recomputed
from sim.cluster.simulation import RunOptions
from sim.cost.features import CostModel
from sim.cost.simple import ConstantCost, ExponentialCost
from sim.run.deployment import Deployment, Parts, build
from sim.run.run import Run, RunPlan, log_header, run_plan
from sim.workloads.generators import generate, preset
from sim.workloads.table import Workload

POLICIES = ("mixed", "prefill_first", "priority")


class HastyCost(ConstantCost):
    """Claims to be about the hardware, and beats it."""

    physical = True


@dataclass(frozen=True)
class RandomRun:
    """What is run, as a function of the seed."""

    plan: RunPlan
    parts: Parts

    def facts(self) -> Facts:
        """For the recomputation."""
        return Facts(
            self.plan.workload,
            self.parts.kernel,
            self.parts.physics,
            len(self.parts.costs),
            self.plan.slos_ms,
            self.plan.options.max_concurrency,
            getattr(self.parts.costs[0], "physical", True),
        )


@dataclass(frozen=True)
class Judged:
    """A finished run with its log."""

    run: Run
    records: tuple[ExpandedRecord, ...]
    facts: Facts


def random_run(seed: int) -> RandomRun:
    """Policies take turns, and so do synchronous and asynchronous scheduling."""
    rng = Random(seed)
    policy = POLICIES[seed % 3]
    parts = _parts(policy, bool(seed // 3 % 2))
    kernel = replace(parts.kernel, **_kernel_options(rng, parts.kernel))
    replicas = rng.choice((1, 1, 2, 3))
    costs = _costs(rng, seed, replicas, parts)
    workload = _workload(rng, seed, policy, kernel)
    options = RunOptions(
        max_concurrency=rng.choice((None, None, 1, 4)), step_by_step=rng.random() < 0.2
    )
    slos = rng.choice(({}, {"ttft": 60.0, "tpot": 6.0}, {"e2el": 300.0}))
    deployment = replace(
        _deployment(policy, False),
        replicas=replicas,
        router=rng.choice(("round-robin", "least-tokens")),
    )
    plan = RunPlan(workload, deployment, options, slos, seed)
    return RandomRun(plan, replace(parts, kernel=kernel, costs=costs))


def _deployment(policy: str, is_async: bool) -> Deployment:
    return Deployment(
        model="smollm2-135m",
        hardware="l4",
        cost="roofline",
        policy=policy,
        num_kv_blocks=4096,
        max_model_len=8192,
        async_scheduling=is_async,
    )


@cache
def _parts(policy: str, is_async: bool) -> Parts:
    return build(_deployment(policy, is_async), 0)


def _kernel_options(rng: Random, kernel: KernelConfig) -> dict[str, Any]:
    size = rng.choice((1, 4, 16))
    options: dict[str, Any] = {
        "block_size": size,
        "num_blocks": rng.randint(100, 240) // size,
        "max_model_len": rng.choice((110, 400)),
        "max_num_seqs": rng.choice((1, 5, 8)),
        "max_num_batched_tokens": rng.choice((9, 16, 64, 512)),
        "enable_prefix_caching": rng.random() < 0.8,
    }
    if kernel.policy != "prefill_first":
        options["long_prefill_token_threshold"] = rng.choice((0, 0, 7))
        options["watermark_blocks"] = rng.choice((0, 0, 1))
        options["reserve_full_prompt"] = rng.random() < 0.7
        if kernel.policy == "mixed" and rng.random() < 0.15:
            options["prefill_schedule_interval"] = 3
    return options


def _costs(rng: Random, seed: int, replicas: int, parts: Parts) -> tuple[CostModel, ...]:
    kind = rng.choice(("roofline", "constant", "exponential", "hasty"))
    if kind == "roofline":
        return parts.costs * replicas
    if kind == "exponential":
        return tuple(ExponentialCost(4_000_000, seed + index) for index in range(replicas))
    if kind == "hasty":
        return tuple(HastyCost(900_000) for _ in range(replicas))
    return (ConstantCost(5_000_000),) * replicas


def _workload(rng: Random, seed: int, policy: str, kernel: KernelConfig) -> Workload:
    """Arrivals that queue up, prompts that share beginnings, and a few that can never fit."""
    kind = rng.choice(("poisson", "gamma", "closed", "sessions", "sessions"))
    spec = preset(
        kind,
        rate=rng.choice((20.0, 120.0)),
        prompt="uniform:1:60",
        output=rng.choice(("uniform:1:3", "uniform:1:40")),
        num_requests=rng.choice((8, 16, 25)) if seed % 20 else 260,
        clients=5,
        think_s=rng.choice((0.0, 0.01)),
        turns="uniform:1:4",
        shared_prefix=rng.choice((0, 20)),
    )
    workload = generate(kind, spec, seed)
    for row in range(1, len(workload)):
        if rng.random() < 0.06:
            workload.output_tokens[row] = rng.choice((300, 500))
    workload.prompt_tokens[0], workload.output_tokens[0] = min(workload.prompt_tokens[0], 40), 3
    if workload.sessions is not None:  # a prompt holds the answers before it
        lengths = [len(workload.prompt(row)) for row in range(len(workload))]
        workload.prompt_tokens = array("q", lengths)
    if policy == "priority":
        workload.priorities = array("q", [rng.choice((0, 0, 1, 5)) for _ in range(len(workload))])
    return workload


def judged(run: RandomRun) -> Judged:
    """Runs it, through a step log in a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.jsonl"
        with StepLogWriter(path, log_header(run.plan, run.parts)) as log:
            finished = run_plan(run.plan, run.parts, log)
        return Judged(finished, tuple(StepLogReader(path).expanded()), run.facts())


def every_figure(run: Judged, changes: Mapping[str, object] | None = None) -> None:
    """LAW-M11: the summary shows what log and requests say; `changes` spoil its top level."""
    compare({**run.run.summary.to_json(), **(changes or {})}, recomputed(run.records, run.facts))


def judge_seed(seed: int) -> None:
    """LAW-M11 on one random run."""
    every_figure(judged(random_run(seed)))
