"""The options of `lockstep sim run`, shared with the verbs that run many simulations."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace

from engine.arguments.parser import Group, VerbParser, check_applies
from engine.arguments.table import DEPLOYMENT as DEPLOYMENT_OPTIONS
from engine.core.errors import ConfigError
from sim.cluster.simulation import RunOptions
from sim.run.deployment import COST_HELP, Deployment, check_policy_has
from sim.run.option_table import (
    ARCHIVE,
    GAMMA,
    IN_CHARACTERS,
    PLAIN_HASHES,
    RUN,
    SIM_TABLE,
    TIMED,
    UNTIMED,
    WITH_OUT,
    WORKLOAD,
    workload_situations,
)
from sim.specs.hardware import HARDWARE
from sim.specs.models import MODELS
from sim.workloads import lengths
from sim.workloads.generators import generate, preset
from sim.workloads.readers import TraceOptions, read_lengths, read_trace
from sim.workloads.servegen import ServeGenOptions, is_servegen, read_servegen
from sim.workloads.table import Workload

# Fields of a deployment that are no options of a command line.
_NOT_OPTIONS = ("roofline", "found_wanting")
_DETAILS = {
    "model": f"or a config.json, or one of {', '.join(MODELS)}",
    "hardware": f"one of {', '.join(HARDWARE)}",
    "cost": COST_HELP,
    "output_len": lengths.HELP,
    "out": "a folder for summary.json, requests.csv, steps.jsonl, report.html, trace.json",
    "json": "summary.json",
    "expert_parallel": "over those of all replicas, with cost roofline",
}
_DEFAULTS: dict[str, object] = {
    "rate_scale": 1.0,
    "arrival": "poisson",
    "chars_per_token": 4,
    "hash_block_tokens": 16,
    "window_start": 0,
    "window_length": 600,
    "seed": 0,
    "intervals": 0,
    "on_oversize": "reject",
    "perfetto": True,
}


def add_options(parser: VerbParser) -> None:
    """Adds all options of a run."""
    workload = parser.add_argument_group("workload")
    source = workload.add_mutually_exclusive_group(required=True)
    for option in WORKLOAD:
        _add(parser, option.name, source if option.name in ("trace", "workload") else workload)
    _add(parser, "output_len", workload)
    add_deployment_options(parser)
    run = parser.add_argument_group("run and output")
    _add(parser, "seed", run)
    for option in RUN:
        if option.name not in ("router", "until", "kv_cache_dtype"):
            _add(parser, option.name, run)
    for name in ("out", "json"):
        _add(parser, name, run)


def add_deployment_options(parser: VerbParser) -> None:
    """Adds the options that say what serves."""
    group = parser.add_argument_group("deployment")
    for name, default in _deployment_defaults().items():
        parser.option(name, default, detail=_DETAILS.get(SIM_TABLE[name].name, ""), group=group)


def _add(parser: VerbParser, name: str, group: Group) -> None:
    parser.option(name, _DEFAULTS.get(name), detail=_DETAILS.get(name, ""), group=group)


def _deployment_defaults() -> dict[str, object]:
    """The fields of a deployment that a command line can set, in the order of the table."""
    order = [option.name for option in DEPLOYMENT_OPTIONS]
    order += ["router", "dtype", "kv_cache_dtype"]
    default = Deployment()
    names = [field.name for field in fields(Deployment) if field.name not in _NOT_OPTIONS]
    names.sort(key=lambda name: order.index(SIM_TABLE[name].name))
    return {name: getattr(default, name) for name in names}


def deployment_of(arguments: argparse.Namespace) -> Deployment:
    """The deployment that the arguments describe.

    Raises:
        ConfigError: an option that the policy does not have.
    """
    values = {name: getattr(arguments, SIM_TABLE[name].name) for name in _deployment_defaults()}
    deployment = Deployment(**values)
    check_policy_has(deployment)
    return deployment


def run_options_of(arguments: argparse.Namespace) -> RunOptions:
    """The run options that the arguments describe.

    Raises:
        ConfigError: an option was written that means nothing here.
    """
    where = WITH_OUT if arguments.out is not None else "a run without --out"
    check_applies(arguments, ["perfetto"], [where])
    return RunOptions(arguments.on_oversize, arguments.max_concurrency, arguments.step_by_step)


def load_workload(arguments: argparse.Namespace) -> Workload:
    """Reads or draws the workload that the arguments describe.

    Raises:
        ConfigError: an option has an impossible value, or was written and means nothing here.
        InputError: the trace is wrong.
    """
    check_applies(
        arguments, [*(option.name for option in WORKLOAD), "output_len"], _situations(arguments)
    )
    if arguments.workload is not None:
        workload = _synthetic(arguments)
    elif is_servegen(arguments.trace):
        workload = read_servegen(arguments.trace, _servegen_options(arguments))
    else:
        workload = read_trace(arguments.trace, _trace_options(arguments))
    if arguments.rate_scale != 1.0:
        workload.scale_arrivals(arguments.rate_scale)
    return workload


def _situations(arguments: argparse.Namespace) -> list[str]:
    """What the workload is, as far as options depend on it; a trace's first row tells."""
    if arguments.workload is not None:
        return workload_situations(arguments.workload, preset(arguments.workload).kind)
    name = arguments.trace.name
    if is_servegen(arguments.trace):
        return [name, ARCHIVE]
    options = TraceOptions(num_requests=1, hash_block_tokens=arguments.hash_block_tokens)
    try:
        first, found = read_trace(arguments.trace, options), [name, TIMED]
    except ConfigError as error:
        if error.option != "rate":
            raise
        # Without times it cannot be read without a rate.
        first, found = read_trace(arguments.trace, replace(options, rate=1.0)), [name, UNTIMED]
    if UNTIMED in found and arguments.arrival == "gamma":
        found.append(GAMMA)
    if "chars_per_token" in first.parameters:
        found.append(IN_CHARACTERS)
    if first.parameters.get("format") == "plain" and first.hashed is not None:
        found.append(PLAIN_HASHES)
    return found


def _synthetic(arguments: argparse.Namespace) -> Workload:
    spec = preset(
        arguments.workload,
        rate=arguments.rate,
        burstiness=arguments.burstiness,
        prompt=arguments.prompt_len,
        output=arguments.output_len,
        num_requests=arguments.num_requests,
        clients=arguments.clients,
        think_s=arguments.think_s,
        turns=arguments.turns,
        shared_prefix=arguments.shared_prefix,
    )
    return generate(arguments.workload, spec, arguments.seed, read_lengths)


def _trace_options(arguments: argparse.Namespace) -> TraceOptions:
    return TraceOptions(
        num_requests=arguments.num_requests,
        rate=arguments.rate,
        arrival=arguments.arrival,
        burstiness=1.0 if arguments.burstiness is None else arguments.burstiness,
        seed=arguments.seed,
        chars_per_token=arguments.chars_per_token,
        hash_block_tokens=arguments.hash_block_tokens,
    )


def _servegen_options(arguments: argparse.Namespace) -> ServeGenOptions:
    return ServeGenOptions(
        start_s=arguments.window_start,
        duration_s=arguments.window_length,
        seed=arguments.seed,
        num_requests=arguments.num_requests,
        rate=arguments.rate,
    )
