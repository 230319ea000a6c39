"""`lockstep sim plan`: reads a study, searches with live progress, writes table, JSON and HTML."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from engine.arguments.files import check_folder
from engine.arguments.parser import VerbParser
from engine.core.errors import ConfigError, InputError, LockstepError
from engine.steplog.atomic import write_text
from sim.commands.counters import time_left
from sim.planning.cache import ResultCache
from sim.planning.executors import make_executor
from sim.planning.interleave import Driver
from sim.planning.parse import read_study
from sim.planning.plan_files import (
    CACHE,
    PLAN,
    REPORT,
    TABLE_HEADER,
    answer,
    plan_folder,
    table_rows,
    write_plan,
)
from sim.planning.plan_report import render_plan
from sim.planning.planner import Planner
from sim.planning.result import Plan
from sim.planning.sampling import load_source
from sim.planning.study import Study
from sim.planning.trial import Trial, TrialResult
from sim.report.tables import text_table
from sim.run.option_table import SIM_TABLE

NOT_CONFIRMED = 3
_LINE_EVERY_S = 10.0
_DRAW_EVERY_S = 0.2


def main(argv: Sequence[str]) -> int:
    """Carries out a study; returns 0 with an answer, 1 if nothing meets the SLO.

    An answer that long runs do not confirm returns 3.

    Raises:
        ConfigError, InputError: the study or an option is wrong.
    """
    arguments = _parser().parse(argv)
    if arguments.init:
        others = sorted(arguments.given - {"init"})
        if others:
            raise InputError(f"--init writes an example study and takes no --{others[0]}")
        return _init(arguments.study)
    check_folder("out", arguments.out)
    check_folder("cache", arguments.cache)
    study = read_study(arguments.study)
    out = arguments.out or arguments.study.with_name(arguments.study.stem + "-plan")
    folder = plan_folder(out)
    folder.check()  # before hours of search
    plan = _carry_out(study, out, arguments)
    command = shlex.join(["lockstep", "sim", "plan", str(arguments.study)])
    with folder:
        write_plan(plan, folder.path / PLAN)
        write_text(folder.path / REPORT, render_plan(plan, command))
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if arguments.json:
        print((out / PLAN).read_text(encoding="utf-8"), end="")
    else:
        _print_table(plan, out)
    if plan.best is None:
        raise LockstepError(answer(plan))
    if plan.doubt is not None:
        print(f"lockstep: {answer(plan)}", file=sys.stderr)
        return NOT_CONFIRMED
    if not arguments.json:
        print(answer(plan))
    return 0


def _print_table(plan: Plan, out: Path) -> None:
    print(text_table(TABLE_HEADER, table_rows(plan)))
    for candidate, reason in plan.left_out:
        print(f"left out: {candidate.name}: {reason}")
    print(f"plan: {out / PLAN}\nreport: {out / REPORT}")


def _carry_out(study: Study, out: Path, arguments: argparse.Namespace) -> Plan:
    source = load_source(study.workload)
    cache = ResultCache(arguments.cache or out / CACHE, source)
    progress = _Progress(not arguments.quiet)
    with make_executor(source, arguments.jobs, arguments.ray) as executor:
        driver = Driver(executor, cache, progress.trial, progress.answered)
        plan = Planner(study, source, driver, progress.stage).plan()
    progress.end()
    return plan


class _Progress:
    """Live progress on stderr: a line that is redrawn, or now and then a line in a log."""

    def __init__(self, shown: bool) -> None:
        self._shown, self._live = shown, sys.stderr.isatty()
        self._begin = self._drawn = time.monotonic()
        self._done = self._cached = self._stopped = 0
        self._stage_begin, self._answered, self._searches = self._begin, 0, 0

    def stage(self, text: str) -> None:
        """A new stage begins."""
        if self._shown:
            self._clear()
            print(f"{self._seconds():6.0f} s  {text}", file=sys.stderr, flush=True)
        self._stage_begin, self._answered, self._searches = time.monotonic(), 0, 0

    def answered(self, done: int, total: int) -> None:
        """So many searches of the stage have their answer."""
        self._answered, self._searches = done, total

    def trial(self, name: str, trial: Trial, result: TrialResult, cached: bool) -> None:
        """A run has ended, or was found in the cache."""
        self._done += not cached
        self._cached += cached
        self._stopped += result.stopped and not cached
        if not self._shown:
            return
        if result.error is not None:
            self._clear()
            print(f"run failed: {name} at {_rate(trial)}: {result.error}", file=sys.stderr)
        now = time.monotonic()
        if now - self._drawn < (_DRAW_EVERY_S if self._live else _LINE_EVERY_S):
            return
        self._drawn = now
        verdict = "met" if result.met else f"missed {result.binding}"
        text = f"{self._counts()}; {name} at {_rate(trial)}: {verdict}"
        if self._live:
            print(f"\r\x1b[K{self._seconds():6.0f} s  {text[:110]}", end="", file=sys.stderr)
        else:
            print(f"{self._seconds():6.0f} s  {text}", file=sys.stderr)
        sys.stderr.flush()

    def end(self) -> None:
        """Everything has run."""
        if self._shown:
            self._clear()
            print(f"{self._seconds():6.0f} s  {self._counts()}", file=sys.stderr)

    def _counts(self) -> str:
        text = f"{self._done} runs ({self._stopped} stopped early)"
        text += f", {self._cached} from the cache" if self._cached else ""
        passed_s = time.monotonic() - self._stage_begin
        return text + time_left(passed_s, self._answered, self._searches)

    def _seconds(self) -> float:
        return time.monotonic() - self._begin

    def _clear(self) -> None:
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr)


def _rate(trial: Trial) -> str:
    return "saturation" if trial.rate is None else f"{trial.rate:.4g}"


def _init(path: Path) -> int:
    if path.exists():
        raise ConfigError("study", str(path), "exists; --init overwrites nothing")
    example = resources.files("sim") / "data" / "study_example.yaml"
    write_text(path, example.read_text(encoding="utf-8"))
    print(f"wrote {path}; run it with: lockstep sim plan {path}")
    return 0


def _parser() -> VerbParser:
    parser = VerbParser(
        "sim plan",
        "Find the deployment that meets an SLO for a workload, and its capacity.",
        SIM_TABLE,
    )
    parser.add_argument("study", type=Path, metavar="STUDY.yaml", help="the study")
    parser.option("init")
    parser.option("out", detail="a folder (STUDY-plan if it is left out)")
    parser.option("cache", detail="a folder (cache in that of --out if it is left out)")
    parser.option("jobs", 1)
    parser.option("ray")
    parser.option("json", detail="plan.json")
    parser.option("quiet")
    return parser
