"""From a YAML file to a `Study`; everything that can be checked without simulating is."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

from engine.arguments.option import Option
from engine.core.errors import InputError
from sim.cluster.prefill_decode import KvLink
from sim.planning.axes import Fleets, option_value, read_axes, read_fleets
from sim.planning.study import (
    ARRIVALS,
    AUTO,
    CONFIDENCES,
    METHODS,
    METRICS,
    MOST_SEEDS,
    OBJECTIVES,
    ON_OVERSIZE,
    AxisValue,
    Limit,
    Objective,
    SearchSpec,
    ShareGoal,
    Slo,
    Study,
    WorkloadSpec,
)
from sim.planning.yaml import Node, read_yaml
from sim.run.option_table import ARCHIVE, GAMMA, SIM_TABLE, TIMED, workload_situations
from sim.specs.hardware import HARDWARE
from sim.workloads.generators import WORKLOADS
from sim.workloads.servegen import is_servegen

# The short keys of a generator's lengths, beside those of the command line.
_SHORT = {"prompt": "prompt_len", "output": "output_len"}
_FEW_SEEDS = ("seeds", "max_seeds", "verify_seeds")
_PARAMETERS = ("prompt_len", "output_len", "burstiness", "think_s", "turns", "shared_prefix")


def read_study(path: Path) -> Study:
    """Reads and checks a study.

    Raises:
        InputError: what is wrong and at which key.
    """
    root = read_yaml(path)
    names = ("name", "workload", "slo", "objective", "space", "fleets", "prices", "kv_transfer",
             "search")  # fmt: skip
    keys = root.keys(names, required=("workload", "slo", "space"))
    fleets = read_fleets(keys["fleets"]) if "fleets" in keys else {}
    axes = read_axes(keys["space"], fleets)
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
        return WorkloadSpec(on_oversize=oversize, **_generator(node))  # type: ignore[arg-type]
    keys = node.keys((*trace_keys, *common))
    trace = (node.file.parent / keys["trace"].text()).resolve()
    if not trace.is_file():
        raise keys["trace"].error(f"no such file ({trace.name} is sought beside the study)")
    default = WorkloadSpec()
    _check_trace_keys(keys, trace)

    def whole(key: str, least: int, value: int) -> int:
        return keys[key].integer(least) if key in keys else value

    return WorkloadSpec(
        trace=trace,
        arrivals=keys["arrivals"].choice(ARRIVALS) if "arrivals" in keys else default.arrivals,
        burstiness=keys["burstiness"].number(0) if "burstiness" in keys else default.burstiness,
        block_requests=whole("block_requests", 1, default.block_requests),
        num_requests=keys["num_requests"].integer(2) if "num_requests" in keys else None,
        window_start_s=whole("window_start_s", 0, default.window_start_s),
        window_length_s=keys["window_length_s"].integer(1) if "window_length_s" in keys else None,
        on_oversize=oversize,
    )


def _generator(node: Node) -> dict[str, object]:
    """The generator's name and parameters, each of which must mean something to it."""
    keys = node.keys(("generator", "on_oversize", *_SHORT, *_PARAMETERS))
    name = keys["generator"].choice(WORKLOADS)
    if WORKLOADS[name].kind == "closed":
        raise keys["generator"].error("a closed loop sets its own rate, so none can be sought")
    situations = workload_situations(name, WORKLOADS[name].kind)
    fields_of = {option: short for short, option in _SHORT.items()}
    parameters: dict[str, AxisValue] = {}
    for key, entry in keys.items():
        option = (
            SIM_TABLE[_SHORT.get(key, key)] if key not in ("generator", "on_oversize") else None
        )
        if option is None:
            continue
        field = fields_of.get(option.name, option.name)
        if field in parameters:
            raise entry.error(f"is another name of {field}, which is given too")
        parameters[field] = _parameter(entry, option, situations)
    return {"generator": name, "parameters": parameters}


def _parameter(node: Node, option: Option, situations: list[str]) -> AxisValue:
    if option.kind is str and isinstance(node.value, int) and not isinstance(node.value, bool):
        value: AxisValue = str(node.value)
    else:
        value = option_value(node, option)
    with node.complaints():
        option.check_belongs(value, situations)
    return float(value) if option.kind is float else value  # type: ignore[arg-type]


def _check_trace_keys(keys: dict[str, Node], trace: Path) -> None:
    """Refuses what would have no effect: the window of a plain trace, burstiness without gamma."""
    situations = [trace.name, ARCHIVE if is_servegen(trace) else TIMED]
    if "arrivals" in keys and keys["arrivals"].value == "gamma":
        situations.append(GAMMA)
    for key in ("burstiness", "window_start_s", "window_length_s"):
        if key in keys:
            with keys[key].complaints():
                SIM_TABLE[key].check_belongs(keys[key].value, situations)


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


# The rest ---------------------------------------------------------------------------------------


def _prices(node: Node) -> dict[str, float]:
    prices = {}
    for name, entry in node.keys(HARDWARE).items():
        prices[name] = entry.number(0)
    return prices


def _check_prices(
    path: Path,
    axes: dict[str, tuple[AxisValue, ...]],
    fleets: Fleets,
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
    least = {"trials": 1, "seed": 0, "seeds": 2, "max_seeds": 2, "requests": 200, "keep": 1,
             "verify_seeds": 0}  # fmt: skip
    found: dict[str, AxisValue] = {}
    for key, entry in keys.items():
        if key == "method":
            found[key] = entry.choice(METHODS)
        elif key in least:
            found[key] = entry.integer(least[key])
            if key in _FEW_SEEDS and int(str(found[key])) > MOST_SEEDS:
                raise entry.error(f"must be at most {MOST_SEEDS}")
        elif key == "confidence":
            if entry.value not in CONFIDENCES:
                raise entry.error(f"must be one of {', '.join(map(str, CONFIDENCES))}")
            found[key] = entry.number(0, 1)
        elif key == "width":
            found[key] = entry.number(0.001, 0.5, closed=True)
        elif key == "multiple":
            found[key] = entry.number(0, closed=True)
        elif key in ("verify_factor", "longest"):
            found[key] = entry.number(1, closed=True)
        elif key == "tolerance":
            found[key] = entry.number(0.001, 0.5, closed=True)
        else:
            found[key] = entry.number(0, 0.45, closed=True)
    spec = SearchSpec(**found)  # type: ignore[arg-type]
    if spec.seeds > spec.max_seeds:
        if "max_seeds" in keys:
            raise keys["max_seeds"].error(f"must be at least the {spec.seeds} of seeds")
        return replace(spec, max_seeds=spec.seeds)
    return spec
