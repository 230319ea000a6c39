"""`lockstep log diff|expand|trace|join`: command lines of the step-log tools."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from engine.arguments.files import check_writable
from engine.arguments.parser import VerbParser
from engine.steplog.api import StepLogReader, StepLogWriter
from engine.steplog.diff import first_difference
from engine.steplog.encode import dump_line, header_to_json, record_to_json
from engine.steplog.perfetto import write_trace
from engine.steplog.vllm_clients import join_clients


def diff_main(argv: list[str]) -> int:
    """Exit code 1 and the first difference if two logs decide differently."""
    parser = VerbParser("log diff", "Show the first decision that differs between logs.")
    parser.add_argument("left", type=Path, help="step log")
    parser.add_argument("right", type=Path, help="the other one")
    parser.option("times")
    options = parser.parse(argv)
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
    parser = VerbParser("log expand", "Write a step log with one record per step.")
    parser.add_argument("log", type=Path, help="step log")
    parser.option("out", detail="a step log; standard output if it is left out")
    options = parser.parse(argv)
    check_writable("out", options.out)
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


def join_main(argv: list[str]) -> int:
    """Adds to the log of a recording vLLM what the clients of a benchmark saw."""
    parser = VerbParser(
        "log join", "Join the times of a benchmark's clients to the log of a recording vLLM."
    )
    parser.add_argument("log", type=Path, help="log of a vLLM that recorded itself")
    parser.add_argument(
        "result", type=Path, help="what vllm bench serve --save-result --save-detailed wrote"
    )
    parser.option(
        "out", required=True, detail="the log with the clients' times, .jsonl or .jsonl.gz"
    )
    options = parser.parse(argv)
    check_writable("out", options.out)
    joined = join_clients(options.log, options.result, options.out)
    clock = "one clock" if joined.same_clock else "clocks set equal at the fastest request"
    print(
        f"{options.out}: {joined.num_joined} requests joined, {joined.num_before} of the log came"
        f" before them; {clock}"
    )
    return 0


def trace_main(argv: list[str]) -> int:
    """Writes a Perfetto trace."""
    parser = VerbParser("log trace", "Convert a step log to a Chrome/Perfetto trace.")
    parser.add_argument("log", type=Path, help="step log")
    parser.option("out", required=True, detail="the trace, .json")
    parser.option("every_step")
    options = parser.parse(argv)
    check_writable("out", options.out)
    count = write_trace(StepLogReader(options.log), options.out, options.every_step)
    print(f"{options.out}: {count} events; open it at https://ui.perfetto.dev", file=sys.stderr)
    return 0
