"""From a YAML file to a `Study`; everything that can be checked without simulating is."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from engine.core.config import POLICY_NAMES
from engine.core.errors import ConfigError, InputError
from sim.cluster.fleet import ROLES, check_roles
from sim.cluster.prefill_decode import KvLink
from sim.cluster.router import ROUTERS
from sim.planning.study import (
    ARRIVALS,
    AUTO,
    CONFIDENCES,
    METHODS,
    METRICS,
    OBJECTIVES,
    ON_OVERSIZE,
    AxisValue,
    GroupSpec,
    Limit,
    Objective,
    SearchSpec,
    ShareGoal,
    Slo,
    Study,
    WorkloadSpec,
)
from sim.planning.yaml import Node, read_yaml
from sim.specs.hardware import HARDWARE, hardware_named
from sim.specs.models import model_named
from sim.workloads.generators import WORKLOADS

_LEAST = {
    "tp": 1,
    "block_size": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_model_len": 2,
    "num_kv_blocks": 1,
    "long_prefill_token_threshold": 0,
}
DEPLOYMENT_AXES = (
    "model", "hardware", "policy", "cost", *_LEAST, "gpu_memory_utilization", "prefix_caching",
)  # fmt: skip
AXES = (*DEPLOYMENT_AXES, "router", "replicas", "fleet")
_PARAMETERS = ("prompt", "output", "burstiness", "think_s", "turns", "shared_prefix")


def read_study(path: Path) -> Study:
    """Reads and checks a study.

    Raises:
        InputError: what is wrong and at which key.
    """
    root = read_yaml(path)
    names = ("name", "workload", "slo", "objective", "space", "fleets", "prices", "kv_transfer",
             "search")  # fmt: skip
    keys = root.keys(names, required=("workload", "slo", "space"))
    fleets = _fleets(keys["fleets"]) if "fleets" in keys else {}
    axes = _axes(keys["space"], fleets)
    objective = _objective(keys["objective"]) if "objective" in keys else Objective()
    if AUTO in axes.get("replicas", ()) and objective.kind != "min_cost":
        raise keys["space"].mapping()["replicas"].error("auto needs the objective min_cost")
    if objective.kind == "min_cost" and "prices" not in keys:
        raise InputError(f"{path}: prices: is missing; the objective min_cost needs it")
    prices = _prices(keys["prices"]) if "prices" in keys else {}
    _check_prices(path, axes, fleets, prices)
    return Study(
        name=keys["name"].text() if "name" in keys else path.stem,
        path=path,
        workload=_workload(keys["workload"]),
        slo=_slo(keys["slo"]),
        objective=objective,
        axes=axes,
        fleets=fleets,
        prices=prices,
        link=_link(keys["kv_transfer"]) if "kv_transfer" in keys else KvLink(),
        search=_search(keys["search"]) if "search" in keys else SearchSpec(),
    )


# Workload ---------------------------------------------------------------------------------------


def _workload(node: Node) -> WorkloadSpec:
    common = ("on_oversize",)
    trace_keys = ("trace", "arrivals", "burstiness", "block_requests", "num_requests",
                  "window_start_s", "window_length_s")  # fmt: skip
    present = node.mapping()
    if ("trace" in present) == ("generator" in present):
        raise node.error("needs either trace or generator")
    oversize = present["on_oversize"].choice(ON_OVERSIZE) if "on_oversize" in present else "miss"
    if "generator" in present:
        keys = node.keys(("generator", *_PARAMETERS, *common))
        name = keys["generator"].choice(WORKLOADS)
        if WORKLOADS[name].kind == "closed":
            raise keys["generator"].error("a closed loop sets its own rate, so none can be sought")
        parameters = {key: _parameter(keys[key]) for key in _PARAMETERS if key in keys}
        return WorkloadSpec(generator=name, parameters=parameters, on_oversize=oversize)
    keys = node.keys((*trace_keys, *common))
    trace = (node.file.parent / keys["trace"].text()).resolve()
    if not trace.is_file():
        raise keys["trace"].error(f"no such file ({trace.name} is sought beside the study)")
    default = WorkloadSpec()

    def whole(key: str, least: int, value: int) -> int:
        return keys[key].integer(least) if key in keys else value

    return WorkloadSpec(
        trace=trace,
        arrivals=keys["arrivals"].choice(ARRIVALS) if "arrivals" in keys else default.arrivals,
        burstiness=keys["burstiness"].number(0) if "burstiness" in keys else default.burstiness,
        block_requests=whole("block_requests", 1, default.block_requests),
        num_requests=keys["num_requests"].integer(2) if "num_requests" in keys else None,
        window_start_s=whole("window_start_s", 0, default.window_start_s),
        window_length_s=whole("window_length_s", 1, default.window_length_s),
        on_oversize=oversize,
    )


def _parameter(node: Node) -> AxisValue:
    key = node.path.rsplit(".", 1)[1]
    if key == "shared_prefix":
        return node.integer(0)
    if key in ("burstiness", "think_s"):
        return node.number(0, closed=key == "think_s")
    return str(node.value) if isinstance(node.value, int) else node.text()


# SLO and objective ------------------------------------------------------------------------------


def _slo(node: Node) -> Slo:
    keys = node.keys((*(f"{metric}_ms" for metric in METRICS), "share"))
    limits = []
    for metric in METRICS:
        if f"{metric}_ms" in keys:
            for name, value in keys[f"{metric}_ms"].mapping().items():
                limits.append(Limit(metric, _percentile(value, name), value.number(0)))
    goal = _share(keys["share"]) if "share" in keys else None
    if not limits and goal is None:
        raise node.error("holds no limit, so any rate would do")
    return Slo(tuple(limits), goal)


def _percentile(node: Node, name: str) -> float | None:
    if name == "mean":
        return None
    match = re.fullmatch(r"p(\d+(?:\.\d+)?)", name)
    if match is None or not 0 < float(match[1]) <= 100:
        raise InputError(f"{node.file}: {node.path}: must be mean or p1 to p100, such as p99")
    return float(match[1])


def _share(node: Node) -> ShareGoal:
    names = [f"{metric}_ms" for metric in METRICS if metric != "itl"]
    keys = node.keys(("at_least", *names), required=("at_least",))
    limits = {name.removesuffix("_ms"): keys[name].number(0) for name in names if name in keys}
    if not limits:
        raise node.error(f"needs one of {', '.join(names)}")
    return ShareGoal(keys["at_least"].number(0, 1), limits)


def _objective(node: Node) -> Objective:
    keys = node.keys(("kind", "rate", "max_gpus"), required=("kind",))
    kind = keys["kind"].choice(OBJECTIVES)
    if (kind == "min_cost") != ("rate" in keys):
        raise node.error("min_cost needs the rate (requests/s) to be served, and only it does")
    return Objective(
        kind,
        keys["rate"].number(0) if "rate" in keys else None,
        keys["max_gpus"].integer(1) if "max_gpus" in keys else None,
    )


# Space ------------------------------------------------------------------------------------------


def _axes(node: Node, fleets: dict[str, tuple[GroupSpec, ...]]) -> dict[str, tuple[AxisValue, ...]]:
    axes: dict[str, tuple[AxisValue, ...]] = {}
    for key, entry in node.keys(AXES).items():
        values = []
        for item in entry.items():
            value = _axis_value(key, item, fleets)
            if value in values:
                raise item.error("stands twice")
            values.append(value)
        if not values:
            raise entry.error("an empty list leaves nothing to search")
        axes[key] = tuple(values)
    return axes


def _axis_value(key: str, node: Node, fleets: dict[str, tuple[GroupSpec, ...]]) -> AxisValue:
    if key in _LEAST:
        return node.integer(_LEAST[key])
    if key == "replicas":
        return AUTO if node.value == AUTO else node.integer(1)
    if key == "gpu_memory_utilization":
        return node.number(0, 1)
    if key == "prefix_caching":
        if not isinstance(node.value, bool):
            raise node.error("must be true or false")
        return node.value
    if key in ("policy", "router"):
        return node.choice(POLICY_NAMES if key == "policy" else ROUTERS)
    if key == "fleet":
        return node.choice(fleets) if fleets else _no_fleets(node)
    return _named(key, node)


def _no_fleets(node: Node) -> AxisValue:
    raise node.error("the study has no fleets")


def _named(key: str, node: Node) -> str:
    """Models, hardware and costs; relative paths start at the study."""
    text = node.text()
    try:
        if key == "hardware":
            return hardware_named(text).name
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


def _fleets(node: Node) -> dict[str, tuple[GroupSpec, ...]]:
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
    keys = node.keys(("count", "role", *DEPLOYMENT_AXES))
    changes = {key: _axis_value(key, keys[key], {}) for key in DEPLOYMENT_AXES if key in keys}
    count = keys["count"].integer(1) if "count" in keys else 1
    return GroupSpec(count, keys["role"].choice(ROLES) if "role" in keys else "mixed", changes)


# The rest ---------------------------------------------------------------------------------------


def _prices(node: Node) -> dict[str, float]:
    prices = {}
    for name, entry in node.keys(HARDWARE).items():
        prices[name] = entry.number(0)
    return prices


def _check_prices(
    path: Path,
    axes: dict[str, tuple[AxisValue, ...]],
    fleets: dict[str, tuple[GroupSpec, ...]],
    prices: dict[str, float],
) -> None:
    used = {str(name) for name in axes.get("hardware", ("h100",))}
    for groups in fleets.values():
        used |= {str(g.changes["hardware"]) for g in groups if "hardware" in g.changes}
    for name in sorted(used - set(prices)):
        if prices:
            raise InputError(f"{path}: prices.{name}: is missing")


def _link(node: Node) -> KvLink:
    keys = node.keys(("gb_per_s", "latency_us"))
    default = KvLink()
    rate = keys["gb_per_s"].number(0) * 1e9 if "gb_per_s" in keys else default.bytes_per_s
    latency_ns = default.latency_ns
    if "latency_us" in keys:
        latency_ns = round(keys["latency_us"].number(0, closed=True) * 1e3)
    return KvLink(rate, latency_ns)


def _search(node: Node) -> SearchSpec:
    keys = node.keys([field.name for field in fields(SearchSpec)])
    least = {"trials": 1, "seed": 0, "seeds": 2, "requests": 200, "keep": 1, "verify_seeds": 0}
    found: dict[str, AxisValue] = {}
    for key, entry in keys.items():
        if key == "method":
            found[key] = entry.choice(METHODS)
        elif key in least:
            found[key] = entry.integer(least[key])
        elif key == "confidence":
            if entry.value not in CONFIDENCES:
                raise entry.error(f"must be one of {', '.join(map(str, CONFIDENCES))}")
            found[key] = entry.number(0, 1)
        elif key == "verify_factor":
            found[key] = entry.number(1, closed=True)
        elif key == "tolerance":
            found[key] = entry.number(0.001, 0.5, closed=True)
        else:
            found[key] = entry.number(0, 0.45, closed=True)
    return SearchSpec(**found)  # type: ignore[arg-type]
