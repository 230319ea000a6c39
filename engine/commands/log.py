"""`lockstep log diff|expand|trace`: command lines of the step-log tools."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from engine.steplog.api import StepLogReader, StepLogWriter
from engine.steplog.diff import first_difference
from engine.steplog.encode import dump_line, header_to_json, record_to_json
from engine.steplog.perfetto import write_trace


def diff_main(argv: list[str]) -> int:
    """Exit code 1 and the first difference if two logs decide differently."""
    parser = argparse.ArgumentParser(
        prog="lockstep log diff", description="Show the first decision that differs between logs."
    )
    parser.add_argument("left", type=Path)
    parser.add_argument("right", type=Path)
    parser.add_argument("--times", action="store_true", help="compare times too")
    options = parser.parse_args(argv)
    left, right = StepLogReader(options.left), StepLogReader(options.right)
    here, there = asdict(left.header.kernel), asdict(right.header.kernel)
    for name in here:
        if here[name] != there[name]:
            print(f"kernel option {name}: {here[name]!r} against {there[name]!r}")
    difference = first_difference(left, right, options.times)
    print("no decision differs" if difference is None else f"first difference: {difference}")
    return int(difference is not None)


def expand_main(argv: list[str]) -> int:
    """Writes a log with one record per step."""
    parser = argparse.ArgumentParser(
        prog="lockstep log expand", description="Write a step log with one record per step."
    )
    parser.add_argument("log", type=Path)
    parser.add_argument("--out", type=Path, help="file to write (default: standard output)")
    options = parser.parse_args(argv)
    log = StepLogReader(options.log)
    if options.out is not None:
        with StepLogWriter(options.out, log.header) as writer:
            for record in log.expanded():
                writer.write(record)
        return 0
    print(dump_line(header_to_json(log.header)))
    for record in log.expanded():
        print(dump_line(record_to_json(record)))
    return 0


def trace_main(argv: list[str]) -> int:
    """Writes a Perfetto trace."""
    parser = argparse.ArgumentParser(
        prog="lockstep log trace", description="Convert a step log to a Chrome/Perfetto trace."
    )
    parser.add_argument("log", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="trace file to write (.json)")
    parser.add_argument("--every-step", action="store_true", help="one slice per step")
    options = parser.parse_args(argv)
    count = write_trace(StepLogReader(options.log), options.out, options.every_step)
    print(f"{options.out}: {count} events; open it at https://ui.perfetto.dev", file=sys.stderr)
    return 0
