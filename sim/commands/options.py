"""The options of `lockstep sim run`, shared with the verbs that run many simulations."""

from __future__ import annotations

import argparse
from collections.abc import Container
from dataclasses import fields, replace

from engine.arguments.parser import Group, VerbParser, check_applies
from engine.arguments.table import DEPLOYMENT as DEPLOYMENT_OPTIONS
from engine.core.errors import ConfigError
from sim.cluster.simulation import RunOptions
from sim.run.cost_models import COST_HELP
from sim.run.deployment import Deployment, check_policy_has, deployment_with
from sim.run.engines import ENGINES
from sim.run.option_table import (
    ARCHIVE,
    GAMMA,
    HASHED,
    HOST_TIER,
    IN_CHARACTERS,
    RECORDED,
    RUN,
    SIM_TABLE,
    SPLIT,
    SYNTHETIC,
    TEXTS,
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
from sim.workloads.readers import TraceOptions, open_trace, read_lengths, read_trace
from sim.workloads.recorded import is_recorded_run, read_recorded_run
from sim.workloads.servegen import ServeGenOptions, is_servegen, read_servegen
from sim.workloads.table import MAX_TOKENS, Workload

# Fields of a deployment that are no options of a command line.
_NOT_OPTIONS = ("roofline", "found_wanting")
_DETAILS = {
    "model": f"or a config.json, or one of {', '.join(MODELS)}",
    "hardware": f"one of {', '.join(HARDWARE)}",
    "cost": COST_HELP,
    "engine": f"one of {', '.join(ENGINES)}: its options where none are given, and its profile",
    "output_len": lengths.HELP,
    "out": "a folder for summary.json, requests.csv, steps.jsonl, report.html, trace.json",
    "json": "summary.json",
    "expert_parallel": "over those of all replicas, with cost roofline",
}
_DEFAULTS: dict[str, object] = {
    "rate_scale": 1.0,
    "arrival": "poisson",
    "on_bad_row": "leave-out",
    "seed": 0,
    "intervals": 0,
    "on_oversize": "reject",
    "perfetto": True,
}


def add_options(parser: VerbParser) -> None:
    """Adds all options of a run."""
    run = add_run_options(parser)
    for name in ("out", "json"):
        _add(parser, name, run)


def add_run_options(parser: VerbParser, without: Container[str] = ()) -> Group:
    """Adds what decides a run, all but some; returns the group of run and output."""
    add_workload_options(parser)
    add_deployment_options(parser)
    run = parser.add_argument_group("run and output")
    _add(parser, "seed", run)
    for option in RUN:
        if option.name not in ("router", "until", "kv_cache_dtype") and option.name not in without:
            _add(parser, option.name, run)
    return run


def add_workload_options(parser: VerbParser) -> None:
    """Adds the options that say what is asked of the servers."""
    workload = parser.add_argument_group("workload")
    source = workload.add_mutually_exclusive_group(required=True)
    for option in WORKLOAD:
        _add(parser, option.name, source if option.name in ("trace", "workload") else workload)
    _add(parser, "output_len", workload)
    parser.option("tokenizer", group=workload, detail="for a trace of texts")


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
    order += [option.name for option in (*SPLIT, *HOST_TIER)]
    order += ["router", "dtype", "kv_cache_dtype", "engine"]
    default = Deployment()
    names = [field.name for field in fields(Deployment) if field.name not in _NOT_OPTIONS]
    names.sort(key=lambda name: order.index(SIM_TABLE[name].name))
    return {name: getattr(default, name) for name in names}


def deployment_of(arguments: argparse.Namespace) -> Deployment:
    """The deployment that the arguments describe.

    Raises:
        ConfigError: an option that the policy does not have.
    """
    given = {
        name: getattr(arguments, SIM_TABLE[name].name)
        for name in _deployment_defaults()
        if SIM_TABLE[name].name in arguments.given
    }
    deployment = deployment_with(given)
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
    situations = _situations(arguments)
    check_applies(arguments, [*(option.name for option in WORKLOAD), "output_len"], situations)
    for name, places in (("output_len", (SYNTHETIC, TEXTS)), ("tokenizer", (TEXTS,))):
        option = replace(SIM_TABLE[name], belongs_to=places)
        if getattr(arguments, name) is not None:
            option.check_belongs(getattr(arguments, name), situations)
    if arguments.workload is not None:
        workload = _synthetic(arguments)
    elif is_servegen(arguments.trace):
        workload = read_servegen(arguments.trace, _servegen_options(arguments))
    elif is_recorded_run(arguments.trace):
        workload = read_recorded_run(arguments.trace, arguments.num_requests)
    else:
        workload = read_trace(arguments.trace, _trace_options(arguments))
    if arguments.rate_scale != 1.0:
        workload.scale_arrivals(arguments.rate_scale)
    return workload


def reading_notes(workload: Workload) -> list[str]:
    """What somebody should know about how a trace was read, each once."""
    left_out = [f"{count:,} rows left out: {why}" for why, count in workload.left_out.items()]
    return [*left_out, *workload.notes]


def _situations(arguments: argparse.Namespace) -> list[str]:
    """What the workload is, as far as options depend on it; a trace's first row tells."""
    if arguments.workload is not None:
        return workload_situations(arguments.workload, preset(arguments.workload).kind)
    name = arguments.trace.name
    if is_servegen(arguments.trace):
        return [name, ARCHIVE]
    if is_recorded_run(arguments.trace):
        return [name, RECORDED]
    opened = open_trace(arguments.trace, arguments.hash_block_tokens)
    found = [name, TIMED if opened.timed else UNTIMED]
    if not opened.timed and arguments.arrival == "gamma":
        found.append(GAMMA)
    found += [IN_CHARACTERS] if opened.format.chars else []
    found += [TEXTS] if opened.format.text else []
    found += [HASHED] if opened.block_units else []
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
        tokenizer=arguments.tokenizer,
        hash_block_tokens=arguments.hash_block_tokens,
        output_tokens=answer_length(arguments.output_len),
        window_start_s=arguments.window_start or 0,
        window_length_s=arguments.window_length,
        on_bad_row=arguments.on_bad_row,
    )


def answer_length(text: str | None) -> int | None:
    """The length of answers that a trace of prompts lacks.

    Raises:
        ConfigError: not a number of tokens.
    """
    if text is None or (text.isdigit() and text.isascii() and 0 < int(text) < MAX_TOKENS):
        return None if text is None else int(text)
    raise ConfigError("output_len", text, "of a trace must be a number of tokens")


def _servegen_options(arguments: argparse.Namespace) -> ServeGenOptions:
    return ServeGenOptions(
        start_s=arguments.window_start or 0,
        duration_s=600 if arguments.window_length is None else arguments.window_length,
        seed=arguments.seed,
        num_requests=arguments.num_requests,
        rate=arguments.rate,
    )
