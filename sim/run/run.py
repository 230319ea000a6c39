"""A whole run as one call, for the command line, planning and tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from engine.steplog.api import LogHeader, StepListener
from sim.cluster.fleet import FleetSimulation, Member
from sim.cluster.host_link import HostLink
from sim.cluster.prefill_decode import KvLink
from sim.cluster.router import make_router
from sim.cluster.simulation import RunOptions, Simulation
from sim.metrics.result import RunResult
from sim.metrics.run_summary import Provenance, RunIntervals, RunSummary
from sim.metrics.summary import RunFacts, summarize
from sim.run.deployment import Deployment, Parts, build, check_ranges, num_extrapolated, versions
from sim.run.option_table import HOST_TIER, SPLIT
from sim.workloads.table import Workload


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: raw results, the summary, and the parts that it was made of."""

    result: RunResult
    summary: RunSummary
    parts: Parts


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What to simulate; `seed` has already shaped the workload, here it is for cost models."""

    workload: Workload
    deployment: Deployment
    options: RunOptions = field(default_factory=RunOptions)
    slos_ms: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0


def log_header(plan: RunPlan, parts: Parts) -> LogHeader:
    """The header of the run's step log; outputs are known, so they stand in the adds."""
    deployment = plan.deployment
    names = ("prefill_replicas", "decode_replicas") if deployment.prefill_replicas else ()
    split = {name: getattr(deployment, name) for name in names}
    return LogHeader(
        writer="sim",
        kernel=parts.kernel,
        options={"workload": plan.workload.name, **plan.workload.parameters, **split},
        model=asdict(parts.model),
        hardware={"tp": plan.deployment.tp, **asdict(parts.hardware)},
        seed=plan.seed,
        num_replicas=plan.deployment.replicas,
        outputs_in_adds=True,
        lockstep_version=versions()["lockstep-llm"],
    )


def run_plan(
    plan: RunPlan,
    parts: Parts | None = None,
    log: StepListener | None = None,
    on_progress: Callable[[int], None] | None = None,
    intervals: RunIntervals | None = None,
) -> Run:
    """Runs a plan; `parts` of an earlier `build` are used once only where costs keep a state.

    `intervals` of earlier replicates go into the summary as they are.

    Raises:
        ConfigError, InputError: the plan cannot be run, or leaves the range of its cost model.
    """
    parts = parts or build(plan.deployment, plan.seed)
    result = _simulation(plan, parts, log, on_progress).run()
    check_ranges(parts.costs)
    facts = RunFacts(
        parts.hardware,
        plan.deployment.tp,
        plan.slos_ms,
        num_extrapolated(parts.costs),
        provenance(plan, parts),
        intervals,
        parts.trust,
    )
    return Run(result, summarize(result, facts), parts)


def _simulation(
    plan: RunPlan,
    parts: Parts,
    log: StepListener | None,
    on_progress: Callable[[int], None] | None,
) -> Simulation:
    """Equal replicas, or prefill and decode servers."""
    deployment = plan.deployment
    router = make_router(deployment.router)
    if not deployment.prefill_replicas:
        simulation = Simulation(
            plan.workload,
            parts.kernel,
            parts.costs,
            parts.physics,
            router,
            plan.options,
            log,
            on_progress,
        )
        if deployment.host_tier_gb:
            block_bytes = deployment.block_size * parts.model.kv_bytes_per_token(deployment.tp)
            link = HostLink(
                block_bytes, deployment.host_tier_gb_per_s, deployment.host_tier_overlap
            )
            for server in simulation.servers:
                server.host_link = link
        return simulation
    roles = ["prefill"] * deployment.prefill_replicas + ["decode"] * deployment.decode_replicas
    return FleetSimulation(
        plan.workload,
        [
            Member(parts.kernel, cost, parts.physics, role)
            for cost, role in zip(parts.costs, roles, strict=True)
        ],
        router,
        make_router(deployment.router),
        KvLink(
            deployment.kv_transfer_gb_per_s * 1e9,
            round(deployment.kv_transfer_latency_us * 1e3),
            deployment.kv_transfer_layerwise,
        ),
        plan.options,
        on_progress,
        log,
    )


def provenance(plan: RunPlan, parts: Parts) -> Provenance:
    """What decided the figures of a run of these parts."""
    deployment = asdict(plan.deployment)
    del deployment["roofline"], deployment["cost"], deployment["found_wanting"]
    if not deployment["prefill_replicas"]:
        for split in SPLIT:
            del deployment[split.name]
    if not deployment["host_tier_gb"]:
        for host in HOST_TIER:
            del deployment[host.name]
    for option in ("expert_parallel", "async_scheduling", "watermark_blocks", "engine"):
        if not deployment[option]:
            del deployment[option]
    for option in ("dtype", "kv_cache_dtype"):
        if deployment[option] == "auto":
            del deployment[option]
    deployment["model"] = parts.model.name
    return Provenance(
        cost=parts.costs[0].describe(),
        deployment=deployment,
        kernel=parts.kernel.to_json(),
        model=asdict(parts.model),
        hardware=asdict(parts.hardware),
        workload={
            "name": plan.workload.name,
            "num_requests": len(plan.workload),
            **plan.workload.parameters,
        },
        options={
            "on_oversize": plan.options.on_oversize,
            "max_concurrency": plan.options.max_concurrency,
        },
        seed=plan.seed,
        versions=versions(),
    )
