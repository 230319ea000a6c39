"""From options to the parts of a run: the one place where names become objects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path

from engine.arguments.suggest import did_you_mean
from engine.arguments.table import policy_situation
from engine.core import ConfigError, InputError, KernelConfig
from engine.steplog.api import DecodeStretch, StepLogReader, StepRecord
from sim.cost.calibrated import CalibratedCost
from sim.cost.expert_parallel import expert_parallel_costs
from sim.cost.features import CostModel
from sim.cost.physics import Physics
from sim.cost.profile import Profile, find_profile, load_profile
from sim.cost.roofline import RooflineCost, RooflineOptions, load_roofline
from sim.cost.simple import ConstantCost, ExponentialCost, ReplayCost, TableCost
from sim.metrics.run_summary import CostTrust
from sim.run.cost_choice import Asked, choose, error_class_of
from sim.run.option_table import SIM_TABLE
from sim.specs.hardware import Hardware, hardware_named
from sim.specs.kv_pool import size_kv_pool
from sim.specs.models import ModelShape, MoeShape, model_named

COST_KINDS = ("auto", "roofline", "calibrated", "table", "replay", "constant", "exponential")
COST_HELP = (
    "auto (calibrated where a shipped profile fits, else roofline), roofline, roofline:FILE,"
    " calibrated, calibrated:PROFILE, table:CSV, replay:STEPS.jsonl, constant:MS or exponential:MS"
)

# Longer steps would soon overflow a clock that counts nanoseconds.
_LONGEST_STEP_MS = 3_600_000
# What the model and the router say of these is nearer to the point than the table's limits.
_NAMED_BY_OTHERS = ("tp",)


@dataclass(frozen=True, slots=True)
class Deployment:
    """Model, hardware and engine options of every replica, by name.

    `num_kv_blocks` and `max_model_len` of None are derived: what fits into memory, and what model
    and pool allow. With `expert_parallel` the replicas share out the experts of a mixture.
    """

    model: str = "qwen3-8b"
    hardware: str = "h100"
    tp: int = 1
    replicas: int = 1
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
    trust = _choice(deployment, model, hardware)
    costs = _costs(deployment, trust.kind, model, hardware, physics, seed)
    return Parts(model, hardware, kernel, physics, costs, trust)


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
    return replace(checked, num_blocks=num_blocks, max_model_len=max_model_len)


def _choice(deployment: Deployment, model: ModelShape, hardware: Hardware) -> CostTrust:
    """The kind of cost model: what `auto` takes, or what was asked for by name."""
    kind, _, argument = deployment.cost.partition(":")
    ep, overlapped = deployment.expert_parallel, deployment.async_scheduling
    if deployment.cost == "auto":
        asked = Asked(model, hardware, deployment.tp, ep, overlapped)
        return choose(asked, dict(deployment.found_wanting))
    if kind == "calibrated" and overlapped:
        raise ConfigError(
            "async_scheduling", True, "profiles are of engines without it; use cost=roofline"
        )
    return CostTrust(kind, error_class_of(kind, argument), {})


def _costs(
    deployment: Deployment,
    kind: str,
    model: ModelShape,
    hardware: Hardware,
    physics: Physics,
    seed: int,
) -> tuple[CostModel, ...]:
    argument = deployment.cost.partition(":")[2]
    replicas = range(deployment.replicas)
    if kind == "calibrated" and not deployment.expert_parallel:
        profile = _profile(deployment, model, hardware, argument)
        return tuple(CalibratedCost(profile, physics) for _ in replicas)
    if kind == "roofline":
        options = load_roofline(Path(argument)) if argument else deployment.roofline
        ranks = physics.expert_ranks
        roofline = RooflineCost(model, hardware, deployment.tp, options, ranks)
        if deployment.expert_parallel:
            return expert_parallel_costs(roofline, deployment.replicas)
        return tuple(roofline for _ in replicas)
    if deployment.expert_parallel:
        raise ConfigError("expert_parallel", True, f"cost={deployment.cost} knows no experts")
    if kind == "constant":
        return tuple(ConstantCost(_milliseconds(deployment.cost, argument)) for _ in replicas)
    if kind == "exponential":
        mean_ns = _milliseconds(deployment.cost, argument)
        return tuple(ExponentialCost(mean_ns, seed * 1_000_003 + index) for index in replicas)
    if kind == "table" and argument:
        return tuple(TableCost(Path(argument)) for _ in replicas)
    if kind == "replay" and argument:
        durations = read_step_durations(Path(argument))
        return tuple(ReplayCost(durations.get(index, []), argument) for index in replicas)
    hint = did_you_mean(kind, COST_KINDS)
    raise ConfigError("cost", deployment.cost, f"must be {COST_HELP}{hint}")


def _profile(deployment: Deployment, model: ModelShape, hardware: Hardware, path: str) -> Profile:
    """The named profile, or the shipped one that fits."""
    if path:
        profile = load_profile(path)
        profile.check_fits(model, hardware, deployment.tp)
        return profile
    found = find_profile(model, hardware, deployment.tp)
    if found is None:
        raise ConfigError(
            "cost",
            deployment.cost,
            f"no shipped profile is for {model.name} on {hardware.name} at tp={deployment.tp};"
            " name one as calibrated:PROFILE",
        )
    return found


def _milliseconds(option: str, text: str) -> int:
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = math.nan
    if not 0 <= milliseconds <= _LONGEST_STEP_MS:
        limit = f"needs a number of milliseconds up to {_LONGEST_STEP_MS:,}, an hour"
        raise ConfigError("cost", option, limit)
    return round(milliseconds * 1e6)


def read_step_durations(path: Path) -> dict[int, list[int]]:
    """Durations of all steps in a step log, by replica."""
    durations: dict[int, list[int]] = {}
    for record in StepLogReader(path):
        if isinstance(record, DecodeStretch):
            durations.setdefault(record.replica, []).extend(record.durations_ns)
        elif isinstance(record, StepRecord):
            durations.setdefault(record.replica, []).append(record.duration_ns)
    if not durations:
        raise InputError(f"{path}: holds no step")
    return durations


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
        if isinstance(cost, CalibratedCost):
            cost.check_range()
