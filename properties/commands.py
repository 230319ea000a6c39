"""`lockstep verify search|replay|conformance|...`: exit 0 kept, 1 a law is broken, 2 bad usage."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from engine.arguments.files import check_folder, check_writable
from engine.arguments.parser import VerbParser
from engine.core.errors import InputError
from engine.steplog.atomic import write_text
from properties.defects.perturb import Perturbed
from properties.follower.goals import GOALS
from properties.follower.view import LawBroken, law_name
from properties.search import failures
from properties.search.failures import KERNEL, load_factory, read_failure, workload_of
from properties.search.run import Factory, kernel
from properties.search.search import SearchResult, search, workload_of_seed


def search_main(argv: list[str]) -> int:
    """`lockstep verify search`."""
    parser = VerbParser(
        "verify search", "Runs random small workloads through the kernel and checks every law."
    )
    parser.option("seconds", detail="60 unless workloads are counted")
    parser.option("workloads")
    parser.option("seed", 0, detail="the first workload")
    parser.option("jobs", 1)
    parser.option("policy", detail="all of them unless given")
    parser.option("async_scheduling", False, detail="only workloads decided one step ahead")
    parser.option("target", KERNEL)
    parser.option("out", Path("out/failures"), detail="a folder for failure files")
    parser.option("json", detail="the record")
    parser.add_argument(
        "record", nargs="?", type=Path, metavar="FILE", help="with --json: write the record here"
    )
    args = parser.parse(argv)
    if args.record is not None and not args.json:
        parser.error(f"{args.record} is a word too many; with --json the record is written there")
    if args.record is not None:
        args.record.parent.mkdir(parents=True, exist_ok=True)
    check_writable("json", args.record)
    check_folder("out", args.out)
    load_factory(args.target)  # a typing error shows before any work
    seconds = args.seconds
    if seconds is None and args.workloads is None:
        seconds = 60.0
    searched = failures.commit()  # the tree may move on meanwhile
    result = search(
        args.seed,
        seconds,
        args.workloads,
        args.jobs,
        args.policy,
        args.target,
        only_async=args.async_scheduling,
    )
    record = {**_record(result, args), "commit": searched}
    text = json.dumps(record, indent=1)
    if args.json and args.record is None:
        print(text)
    else:
        _report(result)
    if args.record is not None:
        write_text(args.record, text + "\n")
    for seed, mode, law, _ in result.failures[:3]:
        written = _write(args, seed, mode, law)
        print(f"replay with: lockstep verify replay {written}", file=sys.stderr)
    return 1 if result.failures or result.missed_goals else 0


def _write(args: argparse.Namespace, seed: int, mode: str, law: str) -> Path:
    """Shrinks a failure and writes it."""
    target = args.target
    if mode == "perturbed" and target == KERNEL:
        target = f"{Perturbed.__module__}:{Perturbed.__name__}"
    factory = _factory(target)
    options = {"perturbed": mode == "perturbed", "thorough": mode != "plain"}
    drawn = workload_of_seed(seed, args.policy, args.async_scheduling)
    workload = failures.shrink(drawn, law, factory, **options)
    broken = failures.failure_of(workload, factory, **options)
    path: Path = args.out / f"{law}-{seed}.json"
    found = broken or LawBroken(law, "?")
    failures.write_failure(path, workload, found, seed, target, options["thorough"])
    return path


def _factory(target: str) -> Factory:
    return kernel if target == KERNEL else load_factory(target)


def _record(result: SearchResult, args: argparse.Namespace) -> dict[str, Any]:
    options = [f"--seed {args.seed}", f"--jobs {args.jobs}"]
    options += [f"--seconds {args.seconds:g}"] if args.seconds else []
    options += [f"--workloads {args.workloads}"] if args.workloads else []
    options += ["--async-scheduling"] if args.async_scheduling else []
    return {
        "command": f"lockstep verify search {' '.join(options)}",
        "version": failures.lockstep_version(),
        "commit": "",
        "python": platform.python_version(),
        "machine": f"{_cpu()}, {os.cpu_count()} cores",
        "workloads": result.workloads,
        "by_policy": dict(result.by_policy),
        "with_reference_or_audit": result.thorough,
        "steps": result.steps,
        "seconds": round(result.seconds, 1),
        "workloads_per_second": round(result.workloads / max(result.seconds, 1e-9), 1),
        "goals": {goal: result.goals[goal] for goal in GOALS},
        "missed_goals": result.missed_goals,
        "failures": [list(failure) for failure in result.failures],
    }


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _report(result: SearchResult) -> None:
    rate = result.workloads / max(result.seconds, 1e-9)
    print(
        f"{result.workloads} workloads ({dict(result.by_policy)}), {result.steps} steps in "
        f"{result.seconds:.1f} s: {rate:.0f} workloads/s"
    )
    reached = sum(1 for goal in GOALS if result.goals[goal])
    print(f"{reached} of {len(GOALS)} goals reached, {len(result.failures)} failures")
    for goal in result.missed_goals:
        print(f"goal never reached: {goal}")
    for seed, mode, law, detail in result.failures[:10]:
        print(f"seed {seed} ({mode}) breaks {law_name(law)}: {detail}")


def replay_main(argv: list[str]) -> int:
    """`lockstep verify replay`."""
    parser = VerbParser("verify replay", "Replays a failure file of a search.")
    parser.add_argument("file", type=Path, help="failure file")
    args = parser.parse(argv)
    record = read_failure(args.file)
    try:
        workload = workload_of(record)
    except (TypeError, ValueError) as error:
        raise InputError(f"{args.file}: {error}") from error
    target = record["target"]
    options = {
        "perturbed": target.startswith(Perturbed.__module__),
        "thorough": record.get("thorough", True),
    }
    print(f"{target}, {workload.config}")
    for operation in workload.operations:
        print(f"  {json.dumps(operation)}")
    broken = failures.failure_of(workload, _factory(target), **options)
    if broken is None:
        print(f"all laws are kept (the file says {law_name(record['law'])})")
        return 0
    print(f"breaks {law_name(broken.law)}: {broken.detail}", file=sys.stderr)
    return 1


def conformance_main(argv: list[str]) -> int:
    """`lockstep verify conformance`."""
    parser = VerbParser(
        "verify conformance",
        "Checks a scheduler of yours against the laws; see docs/conformance.md.",
    )
    parser.option("target", required=True, detail="the adapter")
    parser.option("workloads", 2000)
    parser.option("seed", 0, detail="the first workload")
    args = parser.parse(argv)
    from properties.conformance.kit import check_adapter
    from properties.conformance.report import describe

    sys.path.insert(0, os.getcwd())  # adapters usually lie in the folder that one works in
    report = check_adapter(load_factory(args.target), args.workloads, args.seed)
    print(describe(report), file=sys.stdout if report.passed else sys.stderr)
    return 0 if report.passed else 1
