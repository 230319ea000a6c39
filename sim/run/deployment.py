"""From options to the parts of a run: the one place where names become objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import metadata
from typing import Any

from engine.arguments.table import policy_situation
from engine.core import ConfigError, KernelConfig
from sim.cost.calibrated import CalibratedCost
from sim.cost.features import CostModel
from sim.cost.physics import Physics
from sim.cost.pipelined import PipelinedCost
from sim.cost.roofline import RooflineOptions
from sim.cost.trust import trust_of
from sim.metrics.run_summary import CostTrust
from sim.run.cost_choice import Asked, choose
from sim.run.cost_models import costs_of
from sim.run.engines import engine_named, family_named
from sim.run.option_table import SIM_TABLE
from sim.specs.hardware import Hardware, hardware_named
from sim.specs.kv_pool import size_kv_pool
from sim.specs.models import ModelShape, MoeShape, model_named

# What the model and the router say of these is nearer to the point than the table's limits.
_NAMED_BY_OTHERS = ("tp",)


@dataclass(frozen=True, slots=True)
class Deployment:
    """Model, hardware and engine options of every replica, by name.

    `num_kv_blocks` and `max_model_len` of None are derived: what fits into memory, and what model
    and pool allow. With `expert_parallel` the replicas share out the experts of a mixture.
    `engine` says whose profile is meant; `deployment_with` takes its options too.
    With `prefill_replicas` and `decode_replicas` the replicas are the sum of both, the prefill
    servers first, and `kv_transfer_...` is the way of the KV between them.
    """

    model: str = "qwen3-8b"
    hardware: str = "h100"
    tp: int = 1
    replicas: int = 1
    prefill_replicas: int = 0
    decode_replicas: int = 0
    kv_transfer_gb_per_s: float = 50.0
    kv_transfer_latency_us: float = 100.0
    kv_transfer_layerwise: bool = False
    host_tier_gb: float = 0.0
    host_tier_gb_per_s: float = 50.0
    host_tier_overlap: bool = False
    router: str = "round-robin"
    policy: str = "mixed"
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    prefix_caching: bool = True
    expert_parallel: bool = False
    async_scheduling: bool = False
    long_prefill_token_threshold: int = 0
    watermark_blocks: int = 0
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    cost: str = "auto"
    engine: str | None = None
    roofline: RooflineOptions = field(default_factory=RooflineOptions)
    # Kinds of cost models that a run has shown not to do here, each with the reason; for cost auto.
    found_wanting: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Parts:
    """The objects that a deployment names."""

    model: ModelShape
    hardware: Hardware
    kernel: KernelConfig
    physics: Physics
    costs: tuple[CostModel, ...]
    trust: CostTrust


def deployment_with(given: Mapping[str, Any]) -> Deployment:
    """The options that were given, and where an engine is among them, its own for the others.

    Raises:
        ConfigError: no such engine or hardware.
    """
    given = {**given, **split_replicas(given)}
    check_host_tier(given)
    if given.get("engine") is None:
        return Deployment(**given)
    hardware = hardware_named(given.get("hardware", Deployment().hardware))
    options = engine_named(given["engine"]).options(hardware)
    if given.get("prefill_replicas"):
        options = {name: value for name, value in options.items() if name != "async_scheduling"}
    return Deployment(**{**options, **given})


def check_host_tier(given: Mapping[str, Any]) -> None:
    """Refuses a host tier where there can be none, and what belongs to one that is not there.

    Raises:
        ConfigError: names the option.
    """
    size = given.get("host_tier_gb")
    if not size:
        for name in ("host_tier_gb_per_s", "host_tier_overlap"):
            if given.get(name) is not None:
                raise ConfigError(name, given[name], "belongs to a run with --host-tier-gb")
    elif given.get("prefill_replicas"):
        raise ConfigError("host_tier_gb", size, "is not simulated with prefill_replicas")
    elif given.get("prefix_caching") is False:
        raise ConfigError("host_tier_gb", size, "needs prefix_caching")
    elif given.get("policy", "mixed") == "prefill_first":
        raise ConfigError("host_tier_gb", size, "belongs to policy mixed and priority")


def split_replicas(given: Mapping[str, Any]) -> dict[str, int]:
    """The number of replicas where prefill and decode have servers of their own.

    Raises:
        ConfigError: one of the two kinds is missing, or their number was given as well.
    """
    counts = {kind: given.get(f"{kind}_replicas") or 0 for kind in ("prefill", "decode")}
    if not any(counts.values()):
        for name in ("gb_per_s", "latency_us", "layerwise"):
            if given.get(f"kv_transfer_{name}") is not None:
                value = given[f"kv_transfer_{name}"]
                reason = "belongs to a run with --prefill-replicas and --decode-replicas"
                raise ConfigError(f"kv_transfer_{name}", value, reason)
        return {}
    for kind, other in (("prefill", "decode"), ("decode", "prefill")):
        if not counts[kind]:
            reason = f"must be at least 1 where {other}_replicas={counts[other]}"
            raise ConfigError(f"{kind}_replicas", counts[kind], reason)
    if given.get("replicas") is not None:
        reason = "is the sum of prefill_replicas and decode_replicas here; leave it out"
        raise ConfigError("replicas", given["replicas"], reason)
    return {"replicas": sum(counts.values())}


def build(deployment: Deployment, seed: int) -> Parts:
    """Checks a deployment and makes its parts.

    Raises:
        ConfigError: an option has an impossible value.
        InputError: a file that an option names is unreadable or wrong.
    """
    _check_options(deployment)
    model = model_named(deployment.model, deployment.dtype, deployment.kv_cache_dtype)
    hardware = hardware_named(deployment.hardware)
    model.check_tp(deployment.tp)
    expert_ranks = _expert_ranks(deployment, model)
    kernel = _kernel_config(deployment, model, hardware, expert_ranks)
    physics = Physics(model, hardware, deployment.tp, expert_ranks)
    passed_over: Mapping[str, str] = {}
    kind = deployment.cost.partition(":")[0]
    if deployment.cost == "auto":
        kind, passed_over = choose(_asked(deployment, model, hardware), deployment.found_wanting)
    costs = costs_of(deployment, kind, model, hardware, physics, seed)
    trust = trust_of(costs[0], kind)
    return Parts(model, hardware, kernel, physics, costs, CostTrust(kind, trust, passed_over))


def _check_options(deployment: Deployment) -> None:
    """Every value against the table of options."""
    for item in fields(deployment):
        option = SIM_TABLE.get(item.name)
        if option is not None and item.name not in _NAMED_BY_OTHERS:
            option.check(getattr(deployment, item.name))


def check_policy_has(deployment: Deployment) -> None:
    """Refuses what was set and belongs to another policy; `build` lets it have no effect.

    Raises:
        ConfigError: names the option and its policies.
    """
    situation = [policy_situation(deployment.policy)]
    for item in fields(deployment):
        value = getattr(deployment, item.name)
        if item.name in SIM_TABLE and value != item.default:
            SIM_TABLE[item.name].check_belongs(value, situation)


def _expert_ranks(deployment: Deployment, model: ModelShape) -> int:
    """GPUs over which the experts are spread."""
    if not deployment.expert_parallel:
        return deployment.tp
    if not isinstance(model, MoeShape) or not model.is_mixture:
        raise ConfigError("expert_parallel", True, f"{model.name} has no experts")
    if deployment.prefill_replicas:
        raise ConfigError("expert_parallel", True, "is not simulated with prefill_replicas")
    ranks = deployment.replicas * deployment.tp
    if model.num_experts % ranks:
        raise ConfigError(
            "expert_parallel", True, f"{model.num_experts} experts do not divide by {ranks} GPUs"
        )
    return ranks


def _kernel_config(
    deployment: Deployment, model: ModelShape, hardware: Hardware, expert_ranks: int
) -> KernelConfig:
    # The pool is sized from these, so they are checked first, with a pool that fits anything.
    checked = KernelConfig(
        num_blocks=1,
        max_model_len=2,
        block_size=deployment.block_size,
        max_num_seqs=deployment.max_num_seqs,
        max_num_batched_tokens=deployment.max_num_batched_tokens,
        policy=deployment.policy,
        enable_prefix_caching=deployment.prefix_caching,
        long_prefill_token_threshold=deployment.long_prefill_token_threshold,
        watermark_blocks=deployment.watermark_blocks,
        async_scheduling=deployment.async_scheduling,
    )
    num_blocks = deployment.num_kv_blocks
    if num_blocks is None:
        num_blocks = size_kv_pool(
            model,
            hardware,
            tp=deployment.tp,
            expert_ranks=expert_ranks,
            utilisation=deployment.gpu_memory_utilization,
            block_size=checked.block_size,
            max_num_batched_tokens=checked.max_num_batched_tokens,
            max_num_seqs=checked.max_num_seqs,
        ).num_blocks
    max_model_len = deployment.max_model_len
    if max_model_len is None:
        max_model_len = max(2, min(model.max_position, num_blocks * checked.block_size))
    if model.window is not None and max_model_len > model.window:
        raise ConfigError(
            "max_model_len",
            max_model_len,
            f"{model.name} attends to a sliding window of {model.window} tokens, which is not"
            f" modelled; with max_model_len={model.window} no request exceeds it",
        )
    kernel = replace(checked, num_blocks=num_blocks, max_model_len=max_model_len)
    if not deployment.host_tier_gb:
        return kernel
    return replace(kernel, host_blocks=_host_blocks(deployment, model))


def _host_blocks(deployment: Deployment, model: ModelShape) -> int:
    """Blocks of a replica's host tier."""
    tp = deployment.tp
    block_bytes = deployment.block_size * model.kv_bytes_per_token(tp) * tp
    found = int(deployment.host_tier_gb * 1e9 / block_bytes)
    if not found:
        reason = f"holds no block; a block of {model.name} has {block_bytes} bytes"
        raise ConfigError("host_tier_gb", deployment.host_tier_gb, reason)
    return found


def _asked(deployment: Deployment, model: ModelShape, hardware: Hardware) -> Asked:
    """What the choice of a cost model depends on."""
    return Asked(
        model,
        hardware,
        deployment.tp,
        deployment.expert_parallel,
        deployment.async_scheduling,
        family_named(deployment.engine),
    )


def versions() -> dict[str, str]:
    """Versions of what decides the result."""
    found = {}
    for name in ("lockstep-llm", "numpy", "simpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def num_extrapolated(costs: Sequence[CostModel]) -> int:
    """Steps outside the range of a cost model, where the model counts them."""
    distinct = {id(cost): cost for cost in costs}
    return sum(getattr(cost, "num_extrapolated", 0) for cost in distinct.values())


def check_ranges(costs: Sequence[CostModel]) -> None:
    """Raises InputError where too many steps lay outside the range of a calibrated model."""
    for cost in costs:
        if isinstance(cost, CalibratedCost | PipelinedCost):
            cost.check_range()
