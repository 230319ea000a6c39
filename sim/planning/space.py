"""Configurations: what the axes of a study combine to, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from engine.core.errors import ConfigError, InputError
from sim.cluster.fleet import Member
from sim.planning.study import AUTO, AxisValue, Study
from sim.run.deployment import Deployment, build, check_policy_has, deployment_with
from sim.specs.hardware import hardware_named

_FLEET_AXES = ("router", "replicas", "fleet")


@dataclass(frozen=True, slots=True)
class Group:
    """Equal servers; `deployment.replicas` says how many."""

    deployment: Deployment
    role: str = "mixed"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration.

    `label` holds the values of the axes that vary in the study; `replicas` counts copies of the
    fleet.
    """

    label: tuple[tuple[str, AxisValue], ...]
    groups: tuple[Group, ...]
    router: str
    replicas: int = 1

    @property
    def name(self) -> str:
        """The varying axes in one line."""
        return " ".join(f"{axis}={_plain(value)}" for axis, value in self.label) or "the only one"

    @property
    def num_fronts(self) -> int:
        """Servers that take new requests."""
        return sum(group.deployment.replicas for group in self.groups if group.role != "decode")

    def num_gpus(self) -> int:
        """GPUs of all servers."""
        return sum(group.deployment.replicas * group.deployment.tp for group in self.groups)

    def price_per_hour(self, prices: Mapping[str, float]) -> float | None:
        """Price of all GPUs, or None where the study names no prices."""
        if not prices:
            return None
        total = 0.0
        for group in self.groups:
            name = hardware_named(group.deployment.hardware).name
            total += group.deployment.replicas * group.deployment.tp * prices[name]
        return total

    def scaled(self, replicas: int) -> Candidate:
        """The same with another number of copies."""
        groups = tuple(
            Group(
                replace(
                    group.deployment,
                    replicas=group.deployment.replicas // self.replicas * replicas,
                ),
                group.role,
            )
            for group in self.groups
        )
        label = tuple(pair for pair in self.label if pair[0] != "replicas")
        return Candidate((*label, ("replicas", replicas)), groups, self.router, replicas)

    def members(self, seed: int) -> list[Member]:
        """The servers, each with a cost model of its own.

        Raises:
            ConfigError, InputError: the configuration is impossible.
        """
        members = []
        for index, group in enumerate(self.groups):
            parts = build(group.deployment, seed + 1009 * index)
            members += [Member(parts.kernel, cost, parts.physics, group.role)
                        for cost in parts.costs]  # fmt: skip
        return members


def _without_folder(value: AxisValue) -> AxisValue:
    """A file by its name: where it lies would make plans differ between machines."""
    if not isinstance(value, str) or "/" not in value:
        return value
    kind, colon, path = value.partition(":")
    return f"{kind}{colon}{Path(path).name}" if colon else Path(value).name


def _plain(value: AxisValue) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def all_choices(study: Study) -> Iterator[dict[str, AxisValue]]:
    """Every combination of the axes, in the order of the file."""
    names = list(study.axes)
    for values in product(*study.axes.values()):
        yield dict(zip(names, values, strict=True))


def candidate_of(study: Study, choice: Mapping[str, AxisValue]) -> Candidate:
    """The configuration of one value per axis; `replicas` auto begins with one."""
    varying = [axis for axis, values in study.axes.items() if len(values) > 1]
    label = tuple((axis, _without_folder(choice[axis])) for axis in varying)
    replicas = choice.get("replicas", 1)
    copies = 1 if replicas == AUTO else int(str(replicas))
    settings = {axis: value for axis, value in choice.items() if axis not in _FLEET_AXES}
    fleet = choice.get("fleet")
    groups = []
    if fleet is None:
        groups.append(Group(_deployment(settings, copies)))
    else:
        for group in study.fleets[str(fleet)]:
            changed = {**settings, **group.changes}
            groups.append(Group(_deployment(changed, group.count * copies), group.role))
    return Candidate(label, tuple(groups), str(choice.get("router", "round-robin")), copies)


def _deployment(settings: Mapping[str, AxisValue], replicas: int) -> Deployment:
    return deployment_with({"replicas": replicas, **settings})


def merge_equal(candidates: list[Candidate]) -> list[Candidate]:
    """Leaves out what differs only in a router that has no choice to make."""
    merged: dict[tuple[object, ...], Candidate] = {}
    for candidate in candidates:
        one = candidate.num_fronts == 1 and all(
            group.role != "decode" or group.deployment.replicas == 1 for group in candidate.groups
        )
        key = (candidate.groups, "" if one else candidate.router)
        if one and key not in merged:
            label = tuple(pair for pair in candidate.label if pair[0] != "router")
            candidate = replace(candidate, label=label)
        merged.setdefault(key, candidate)
    return list(merged.values())


def impossible(candidate: Candidate) -> str | None:
    """Why a configuration cannot run at all, or None."""
    try:
        for group in candidate.groups:
            check_policy_has(group.deployment)
        candidate.members(0)
    except (ConfigError, InputError) as error:
        return str(error)
    return None
