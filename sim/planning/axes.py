"""The axes of a study's space and fleets: the options of a deployment under any of their names."""

from __future__ import annotations

from dataclasses import fields

from engine.arguments.option import Option
from engine.core.errors import ConfigError
from sim.cluster.fleet import ROLES, check_roles
from sim.planning.study import AUTO, AxisValue, GroupSpec
from sim.planning.yaml import Node
from sim.run.deployment import Deployment
from sim.run.option_table import SIM_TABLE
from sim.specs.hardware import hardware_named
from sim.specs.models import model_named

# Servers of a fleet are simulated apart, so that they can share no experts, and a step is planned
# when the one before it has ended. The router and the number of copies are those of the fleet.
_NO_AXES = (
    "roofline",
    "found_wanting",
    "expert_parallel",
    "async_scheduling",
    "router",
    "replicas",
)
DEPLOYMENT_AXES = tuple(field.name for field in fields(Deployment) if field.name not in _NO_AXES)
AXES = (*DEPLOYMENT_AXES, "router", "replicas", "fleet")
Fleets = dict[str, tuple[GroupSpec, ...]]


def read_axes(node: Node, fleets: Fleets) -> dict[str, tuple[AxisValue, ...]]:
    """The values of each axis, under the names of `Deployment`.

    Raises:
        InputError: an unknown key, an impossible value, or one that stands twice.
    """
    axes: dict[str, tuple[AxisValue, ...]] = {}
    for key, entry in _by_axis(node, AXES).items():
        values: list[AxisValue] = []
        for item in entry.items():
            value = _axis_value(key, item, fleets)
            if value in values:
                raise item.error("stands twice")
            values.append(value)
        if not values:
            raise entry.error("an empty list leaves nothing to search")
        axes[key] = tuple(values)
    return axes


def option_value(node: Node, option: Option) -> AxisValue:
    """The value of a node, checked against an option's type and limits."""
    with node.complaints():
        option.check(node.value)
    return node.value  # type: ignore[return-value]


def _by_axis(node: Node, axes: tuple[str, ...], others: tuple[str, ...] = ()) -> dict[str, Node]:
    """The entries of a mapping by axis, whichever of its names an option has there."""
    own = {name: axis for axis in axes if axis in SIM_TABLE for name in SIM_TABLE[axis].names}
    own.update({name: name for name in (*axes, *others)})
    found: dict[str, Node] = {}
    for key, entry in node.keys(own).items():
        if own[key] in found:
            raise entry.error(f"is another name of {own[key]}, which is given too")
        found[own[key]] = entry
    return found


def _axis_value(key: str, node: Node, fleets: Fleets) -> AxisValue:
    if key == "fleet":
        return node.choice(fleets) if fleets else _no_fleets(node)
    if key in ("model", "hardware", "cost"):
        return _named(key, node)
    if key == "replicas" and node.value == AUTO:
        return AUTO
    if node.value is None:
        raise node.error("is empty")
    return option_value(node, SIM_TABLE[key])


def _no_fleets(node: Node) -> AxisValue:
    raise node.error("the study has no fleets")


def _named(key: str, node: Node) -> str:
    """Models, hardware and costs; relative paths start at the study."""
    text = node.text()
    try:
        if key == "hardware":
            beside = (node.file.parent / text).resolve()
            if not beside.is_file():
                return hardware_named(text).name
            hardware_named(str(beside))
            return str(beside)
        if key == "model":
            beside = node.file.parent / text
            text = str(beside.resolve()) if beside.exists() else text
            model_named(text)
    except ConfigError as error:
        raise node.error(error.limit) from None
    kind, _, argument = text.partition(":")
    if key == "cost" and kind in ("calibrated", "roofline", "table") and argument:
        beside = (node.file.parent / argument).resolve()
        if not beside.is_file():
            raise node.error("no such file beside the study")
        return f"{kind}:{beside}"
    return text


def read_fleets(node: Node) -> Fleets:
    """The fleets that a study names.

    Raises:
        InputError: a fleet without servers, wrong roles, or a wrong axis.
    """
    fleets = {}
    for name, entry in node.mapping().items():
        groups = tuple(_group(item) for item in entry.items())
        if not groups:
            raise entry.error("has no servers")
        try:
            check_roles(entry.path, [group.role for group in groups])
        except ConfigError as error:
            raise entry.error(error.limit) from None
        fleets[name] = groups
    return fleets


def _group(node: Node) -> GroupSpec:
    keys = _by_axis(node, DEPLOYMENT_AXES, ("count", "role"))
    changes = {key: _axis_value(key, keys[key], {}) for key in DEPLOYMENT_AXES if key in keys}
    count = keys["count"].integer(1) if "count" in keys else 1
    return GroupSpec(count, keys["role"].choice(ROLES) if "role" in keys else "mixed", changes)
