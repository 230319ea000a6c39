"""`lockstep sim sweep`: runs a grid of `sim run`s with several seeds; table, CSV, HTML."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.arguments.files import check_folder
from engine.arguments.option import Table
from engine.arguments.parser import VerbParser
from engine.core.errors import InputError
from engine.steplog.atomic import write_text
from sim.commands.counters import Counter
from sim.commands.options import (
    add_run_options,
    deployment_of,
    load_workload,
    reading_notes,
    run_options_of,
)
from sim.commands.run import parser_of_run, words_of
from sim.commands.sweep_runs import SweepCache, SweepRun, SweepRunner
from sim.metrics.summary import parse_goodput
from sim.planning.executors import executor_of
from sim.report.tables import text_table
from sim.run.option_table import SIM_TABLE
from sim.sweep.grid import Axis, Setting, check_axes, grid, parse_axis
from sim.sweep.points import Point, RunFigures
from sim.sweep.report import render_sweep
from sim.sweep.result import (
    CACHE,
    REPORT,
    Sweep,
    knee_lines,
    sweep_document,
    sweep_folder,
    table_of,
    write_tables,
)

# Each run has no files and no intervals of its own: the seeds are the sweep's.
_NOT_OF_RUNS = ("intervals", "perfetto")
_OWN = ("vary", "seeds", "seed", "out", "cache", "jobs", "ray", "json", "quiet")
_NOT_VARIED = (*_OWN, "trace", "workload", "goodput")


def main(argv: Sequence[str]) -> int:
    """Carries out a sweep; points that cannot run are left out and named.

    Returns 0, or 1 if a run broke off for a reason that is not its options'.

    Raises:
        ConfigError, InputError: the command line is wrong, or no point of the grid can run.
    """
    arguments = _parser().parse(argv)
    check_folder("out", arguments.out)
    check_folder("cache", arguments.cache)
    folder = sweep_folder(arguments.out) if arguments.out is not None else None
    if folder is not None:
        folder.check()  # before hours of runs
    axes = _axes(arguments)
    seeds = range(arguments.seed, arguments.seed + arguments.seeds)
    settings = grid(axes)
    runs = [
        SweepRun(_words(arguments, axes, setting, seed), seed)
        for setting in settings
        for seed in seeds
    ]
    _check(runs)
    results = _carry_out(runs, arguments)
    count = len(seeds)
    points = [
        Point(setting, results[place * count : (place + 1) * count])
        for place, setting in enumerate(settings)
    ]
    if all(point.error is not None for point in points):
        raise InputError(points[0].error or "")
    sweep = Sweep(_command(arguments), axes, seeds, points)
    if folder is not None:
        with folder:
            write_tables(sweep, folder.path)
            write_text(folder.path / REPORT, render_sweep(sweep))
    _print(sweep, arguments.json, arguments.out)
    return int(any(run.crashed for point in points for run in point.runs))


def _axes(arguments: argparse.Namespace) -> list[Axis]:
    options = Table(
        option for name, option in parser_of_run().options.items() if name not in _NOT_VARIED
    )
    varied = {name: option for name, option in options.items() if name not in _NOT_OF_RUNS}
    axes = [parse_axis(text, varied, arguments.given) for text in arguments.vary]
    check_axes(axes, arguments.seeds)
    return axes


def _words(
    arguments: argparse.Namespace, axes: Sequence[Axis], setting: Setting, seed: int
) -> tuple[str, ...]:
    words = words_of(arguments, _OWN)
    for axis in axes:
        words += axis.option.words(setting[axis.name])
    return (*words, "--seed", str(seed))


def _command(arguments: argparse.Namespace) -> str:
    words = words_of(arguments, ("out", "cache", "jobs", "ray", "json", "quiet", "vary"))
    for text in arguments.vary:
        words += ["--vary", text]
    return shlex.join(["lockstep", "sim", "sweep", *words])


def _check(runs: Sequence[SweepRun]) -> None:
    """Raises what is wrong with the options of any run, and with the workload of the first."""
    for run in runs:
        arguments = parser_of_run().parse(run.words)
        parse_goodput(arguments.goodput)
        deployment_of(arguments)
        run_options_of(arguments)
    workload = load_workload(parser_of_run().parse(runs[0].words))
    for line in reading_notes(workload):
        print(f"note: {workload.name}: {line}", file=sys.stderr)


def _carry_out(runs: Sequence[SweepRun], arguments: argparse.Namespace) -> list[RunFigures]:
    """The result of every run, in their order, whatever order they end in."""
    cache = _cache(arguments)
    keys = [cache.key(run) if cache is not None else "" for run in runs]
    results = {place: cache.get(key) for place, key in enumerate(keys)} if cache is not None else {}
    found = {place: result for place, result in results.items() if result is not None}
    waiting = [place for place in range(len(runs)) if place not in found]
    counter = Counter(len(runs), "runs", not arguments.quiet)
    with executor_of(SweepRunner, arguments.jobs, arguments.ray) as executor:
        begun = 0
        for ended in range(len(waiting)):
            while begun < len(waiting) and executor.has_room():
                executor.submit(str(waiting[begun]), runs[waiting[begun]])
                begun += 1
            text, result = executor.next_result()
            found[int(text)] = result
            if cache is not None:
                cache.put(keys[int(text)], result)
            counter(len(runs) - len(waiting) + ended + 1)
    counter.end()
    return [found[place] for place in range(len(runs))]


def _cache(arguments: argparse.Namespace) -> SweepCache | None:
    if arguments.cache is not None:
        return SweepCache(arguments.cache)
    return None if arguments.out is None else SweepCache(arguments.out / CACHE)


def _print(sweep: Sweep, as_json: bool, out: Path | None) -> None:
    for point in sweep.points:
        if point.error is not None:
            print(f"left out: {sweep.name_of(point)}: {point.error}", file=sys.stderr)
    if as_json:
        print(json.dumps(sweep_document(sweep), indent=1, allow_nan=False))
        return
    print(text_table(*table_of(sweep)))
    for line in knee_lines(sweep):
        print(line)
    if out is not None:
        print(f"report: {out / REPORT}")


def _parser() -> VerbParser:
    parser = VerbParser(
        "sim sweep",
        "Vary any options of a simulated run, and draw latency against throughput.",
        SIM_TABLE,
        "%(prog)s (--trace FILE | --workload NAME) --vary OPTION=VALUES [options]",
    )
    own = parser.add_argument_group("sweep")
    parser.option("vary", group=own)
    parser.option("seeds", 3, group=own)
    parser.option("jobs", 1, group=own)
    parser.option("ray", group=own)
    parser.option("cache", detail="a folder (cache in --out if it is left out)", group=own)
    parser.option("quiet", group=own)
    run = add_run_options(parser, _NOT_OF_RUNS)
    parser.option("out", detail="a folder for the CSV tables, JSON and HTML", group=run)
    parser.option("json", detail="sweep.json", group=run)
    return parser
