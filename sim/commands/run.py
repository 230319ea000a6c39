"""`lockstep sim run`: options, the run, and a short table."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path

from engine.arguments.parser import VerbParser
from engine.core.errors import InputError
from engine.steplog.api import StepLogWriter
from engine.steplog.log_folder import STEP_LOG_NAME
from engine.steplog.output_folder import OutputFolder
from sim.commands.counters import Counter
from sim.commands.options import (
    add_options,
    deployment_of,
    load_workload,
    reading_notes,
    run_options_of,
)
from sim.cost.calibrated import OutOfRange
from sim.metrics.run_summary import RunIntervals
from sim.metrics.summary import parse_goodput
from sim.report.headline import gpus_text
from sim.report.run_report import LATENCY_COLUMNS, fact_rows, latency_rows, warnings_of
from sim.report.tables import text_table
from sim.run.deployment import Parts, build
from sim.run.intervals import run_intervals
from sim.run.option_table import SIM_TABLE
from sim.run.outputs import run_folder, write_outputs
from sim.run.run import Run, RunPlan, log_header, run_plan


def run_main(argv: Sequence[str]) -> int:
    """Simulates one workload; returns the exit code 0.

    Raises:
        ConfigError, InputError: the command line or a file is wrong; nothing was written.
    """
    arguments = parser_of_run().parse(argv)
    run = run_of(arguments, shown=True)
    _print_result(run, arguments.json, arguments.out)
    return 0


def parser_of_run() -> VerbParser:
    """The parser of `sim run` with all its options."""
    parser = VerbParser(
        "sim run",
        "Simulate a trace or a synthetic workload with the engine's own scheduler.",
        SIM_TABLE,
        "%(prog)s (--trace FILE | --workload NAME) [options]",
    )
    add_options(parser)
    return parser


def run_of(arguments: argparse.Namespace, shown: bool = False, notes: bool = True) -> Run:
    """The run that parsed arguments describe, its files written if they ask for them.

    With `shown` a terminal gets a progress line; `notes` on how a trace was read go to stderr.
    """
    slos_ms = parse_goodput(arguments.goodput)
    deployment = deployment_of(arguments)
    options = run_options_of(arguments)
    output = run_folder(arguments.out) if arguments.out is not None else None
    # Options and the folder are checked before a long trace is read.
    if output is not None:
        output.check()
    parts = build(deployment, arguments.seed)
    workload = load_workload(arguments)
    for line in reading_notes(workload) if notes else ():
        print(f"note: {workload.name}: {line}", file=sys.stderr)
    plan = RunPlan(workload, deployment, options, slos_ms, arguments.seed)
    try:
        return _carried_out(arguments, plan, parts, output, shown)
    except OutOfRange as error:
        if deployment.cost != "auto":
            raise
        # `auto` promised a model that does: the next one, with what spoke against this one.
        wanting = (*deployment.found_wanting, (error.kind, error.reason))
        plan = replace(plan, deployment=replace(deployment, found_wanting=wanting))
        return _carried_out(arguments, plan, build(plan.deployment, plan.seed), output, shown)


def _carried_out(
    arguments: argparse.Namespace,
    plan: RunPlan,
    parts: Parts,
    output: OutputFolder | None,
    shown: bool,
) -> Run:
    """The run with its intervals, its files written if there is a folder for them."""
    intervals = _intervals_of(arguments, plan, shown)
    if output is None:
        return _simulated(plan, parts, None, intervals, shown)
    with output:
        with StepLogWriter(output.path / STEP_LOG_NAME, log_header(plan, parts)) as log:
            run = _simulated(plan, parts, log, intervals, shown)
        write_outputs(run, output.path, arguments.perfetto, command_of(arguments))
    return run


def _simulated(
    plan: RunPlan,
    parts: Parts,
    log: StepLogWriter | None,
    intervals: RunIntervals | None,
    shown: bool,
) -> Run:
    """The run, with a counter for people."""
    counter = Counter(len(plan.workload), "requests", shown)
    try:
        return run_plan(plan, parts, log, counter if counter.shown else None, intervals)
    except OverflowError:
        raise InputError("the run does not end within 292 simulated years") from None
    finally:
        counter.end()


def _intervals_of(arguments: argparse.Namespace, plan: RunPlan, shown: bool) -> RunIntervals | None:
    """The intervals that were asked for; each replicate draws its own workload."""
    if not arguments.intervals:
        return None

    def plan_of(seed: int) -> RunPlan:
        drawn = argparse.Namespace(**{**vars(arguments), "seed": seed})
        return replace(plan, workload=load_workload(drawn), seed=seed)

    counter = Counter(arguments.intervals, "runs for the intervals", shown)
    found = run_intervals(plan_of, arguments.seed, arguments.intervals, counter)
    counter.end()
    return found


def command_of(arguments: argparse.Namespace) -> str:
    """The command line that the arguments came from, without what only shows or writes."""
    return shlex.join(["lockstep", "sim", "run", *words_of(arguments, ("out", "json"))])


def words_of(arguments: argparse.Namespace, without: Container[str]) -> list[str]:
    """The written options as words of a command line, all but some."""
    words = []
    for name, option in arguments.options.items():
        if name in arguments.given and name not in without:
            words += option.words(getattr(arguments, name))
    return words


def _print_result(run: Run, as_json: bool, out: Path | None) -> None:
    for warning in warnings_of(run.summary):
        print(f"warning: {warning}", file=sys.stderr)
    if as_json:
        print(json.dumps(run.summary.to_json(), indent=2, allow_nan=False))
        return
    print(_title(run))
    print(text_table(["ms", *LATENCY_COLUMNS], latency_rows(run.summary), indent="  "))
    print(text_table([], fact_rows(run.summary), indent="  "))
    if out is not None:
        print(f"report: {out / 'report.html'}")


def _title(run: Run) -> str:
    parts = run.parts
    seed = run.summary.sim.provenance.seed
    gpus = gpus_text(len(run.result.servers), parts.physics.tp, parts.hardware.name)
    return (
        f"{run.result.workload.name}: {parts.model.name} on {gpus},"
        f" {parts.kernel.policy}, {parts.kernel.num_blocks:,} KV blocks of"
        f" {parts.kernel.block_size}, {parts.costs[0].name} cost, seed {seed}"
    )
