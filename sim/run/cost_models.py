"""From the kind of a cost model to the models of a deployment, one per server."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.arguments.suggest import did_you_mean
from engine.core import ConfigError, InputError
from engine.steplog.api import DecodeStretch, StepLogReader, StepRecord
from sim.cost.calibrated import CalibratedCost
from sim.cost.expert_parallel import expert_parallel_costs
from sim.cost.features import CostModel
from sim.cost.hosted import HostedCost, RunDeviceCost, SerialCost
from sim.cost.optable import OptableCost
from sim.cost.physics import Physics
from sim.cost.pipeline_profile import PipelineProfile
from sim.cost.pipelined import PipelinedCost
from sim.cost.profile import Profile
from sim.cost.profiles import AnyProfile, find_profile, load_any_profile, shipped
from sim.cost.roofline import RooflineCost, RooflineOptions, load_roofline
from sim.cost.simple import ConstantCost, ExponentialCost, ReplayCost, TableCost
from sim.run.engines import family_named
from sim.specs.hardware import Hardware
from sim.specs.models import ModelShape

COST_HELP = (
    "auto (calibrated where a shipped profile fits, with --engine vllm-... optable where there are"
    " tables, else roofline), optable, roofline, roofline:FILE, calibrated, calibrated:PROFILE,"
    " table:CSV, replay:STEPS.jsonl, constant:MS or exponential:MS"
)
# Longer steps would soon overflow a clock that counts nanoseconds.
_LONGEST_STEP_MS = 3_600_000


class Deployed(Protocol):
    """What the choice depends on of a deployment."""

    @property
    def cost(self) -> str:
        """The option."""

    @property
    def engine(self) -> str | None:
        """Whose profile is meant."""

    @property
    def tp(self) -> int:
        """GPUs of a replica."""

    @property
    def replicas(self) -> int:
        """Servers."""

    @property
    def async_scheduling(self) -> bool:
        """Whether steps are planned ahead."""

    @property
    def expert_parallel(self) -> bool:
        """Whether the replicas share out the experts."""

    @property
    def roofline(self) -> RooflineOptions:
        """Parameters of the roofline."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the cost models of a deployment are made for."""

    deployment: Deployed
    model: ModelShape
    hardware: Hardware
    physics: Physics
    seed: int
    argument: str

    @property
    def replicas(self) -> range:
        """The servers, by number."""
        return range(self.deployment.replicas)


def costs_of(
    deployment: Deployed,
    kind: str,
    model: ModelShape,
    hardware: Hardware,
    physics: Physics,
    seed: int,
) -> tuple[CostModel, ...]:
    """One cost model per server; those without a state are shared.

    Raises:
        ConfigError: the option has no meaning here.
        InputError: a file that it names is unreadable or wrong.
    """
    argument = deployment.cost.partition(":")[2]
    maker = _MAKERS.get(kind)
    if maker is None or (kind in _NEED_ARGUMENT and not argument):
        hint = did_you_mean(kind, COST_KINDS)
        raise ConfigError("cost", deployment.cost, f"must be {COST_HELP}{hint}")
    if deployment.expert_parallel and kind not in _KNOW_EXPERTS:
        raise ConfigError("expert_parallel", True, f"cost={deployment.cost} knows no experts")
    return maker(Choice(deployment, model, hardware, physics, seed, argument))


def _calibrated(choice: Choice) -> tuple[CostModel, ...]:
    deployment = choice.deployment
    if choice.argument:
        profile = load_any_profile(choice.argument)
        profile.check_fits(choice.model, choice.hardware, deployment.tp)
        if profile.is_asynchronous != deployment.async_scheduling:
            how = "asynchronous" if profile.is_asynchronous else "synchronous"
            raise ConfigError(
                "async_scheduling",
                deployment.async_scheduling,
                f"{choice.argument} is of {how} scheduling",
            )
        return _from_profile(choice, profile)
    found = _shipped(choice)
    if found is None:
        how = "asynchronous" if deployment.async_scheduling else "synchronous"
        engine = f" of {deployment.engine}" if deployment.engine else ""
        raise ConfigError(
            "cost",
            deployment.cost,
            f"no shipped profile{engine} is for {choice.model.name} on {choice.hardware.name} at"
            f" tp={deployment.tp} with {how} scheduling; name one as calibrated:PROFILE",
        )
    return _from_profile(choice, found)


def _shipped(choice: Choice) -> AnyProfile | None:
    deployment = choice.deployment
    family = family_named(deployment.engine)
    return find_profile(
        choice.model, choice.hardware, deployment.tp, deployment.async_scheduling, family
    )


def _from_profile(choice: Choice, profile: AnyProfile) -> tuple[CostModel, ...]:
    if isinstance(profile, Profile):
        return tuple(CalibratedCost(profile, choice.physics) for _ in choice.replicas)
    return tuple(
        PipelinedCost(profile, choice.physics, seed=choice.seed * 1009 + index)
        for index in choice.replicas
    )


def _roofline(choice: Choice) -> tuple[CostModel, ...]:
    deployment, physics = choice.deployment, choice.physics
    argument = choice.argument
    options = load_roofline(Path(argument)) if argument else deployment.roofline
    cost = RooflineCost(
        choice.model, choice.hardware, deployment.tp, options, physics.expert_ranks,
        is_fitted=bool(argument),
    )  # fmt: skip
    if deployment.expert_parallel:
        return expert_parallel_costs(cost, deployment.replicas)
    family = family_named(deployment.engine)
    if deployment.async_scheduling and family is not None and not argument:
        # What the host adds to a step is told apart, so the parameters need not hold it.
        return _with_host(choice, cost, family if family == "lockstep" else "vllm 0.33")
    return tuple(cost for _ in choice.replicas)


def _optable(choice: Choice) -> tuple[CostModel, ...]:
    return _with_host(choice, OptableCost(choice.physics), "vllm 0.33")


def _with_host(choice: Choice, device: RunDeviceCost, family: str) -> tuple[CostModel, ...]:
    """The device with the host that was measured of that engine, on the machine of its profile."""
    profile = next(
        (one for one in shipped()
         if isinstance(one, PipelineProfile) and one.target.engine.startswith(family)),
        None,
    )  # fmt: skip
    assert profile is not None, "a profile of vLLM 0.33 is part of the package"
    layers = choice.model.num_layers
    if choice.deployment.async_scheduling:
        return tuple(
            HostedCost(device, profile, layers, choice.seed * 1009 + index)
            for index in choice.replicas
        )
    return tuple(SerialCost(device, profile, layers) for _ in choice.replicas)


def _constant(choice: Choice) -> tuple[CostModel, ...]:
    time_ns = _milliseconds(choice.deployment.cost, choice.argument)
    return tuple(ConstantCost(time_ns) for _ in choice.replicas)


def _exponential(choice: Choice) -> tuple[CostModel, ...]:
    mean_ns = _milliseconds(choice.deployment.cost, choice.argument)
    return tuple(
        ExponentialCost(mean_ns, choice.seed * 1_000_003 + index) for index in choice.replicas
    )


def _table(choice: Choice) -> tuple[CostModel, ...]:
    return tuple(TableCost(Path(choice.argument)) for _ in choice.replicas)


def _replay(choice: Choice) -> tuple[CostModel, ...]:
    durations = read_step_durations(Path(choice.argument))
    return tuple(ReplayCost(durations.get(index, []), choice.argument) for index in choice.replicas)


Maker = Callable[[Choice], tuple[CostModel, ...]]
_MAKERS: dict[str, Maker] = {
    "calibrated": _calibrated,
    "optable": _optable,
    "roofline": _roofline,
    "constant": _constant,
    "exponential": _exponential,
    "table": _table,
    "replay": _replay,
}
_NEED_ARGUMENT = ("constant", "exponential", "table", "replay")
_KNOW_EXPERTS = ("roofline",)
COST_KINDS = ("auto", *_MAKERS)


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
