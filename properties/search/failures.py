"""Failure files: everything that is needed to replay a failing workload, as JSON."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from engine.core.config import KernelConfig
from engine.core.errors import InputError
from engine.steplog.atomic import write_text
from properties.follower.view import LawBroken
from properties.search.driver import Operation
from properties.search.run import Factory, run_workload
from properties.search.workloads import Workload

# Grows when the meaning of operations or of the fake model changes.
FORMAT = "lockstep-failure-1"
KERNEL = "engine.core:Scheduler"


def lockstep_version() -> str:
    """The installed version of the distribution."""
    try:
        return version("lockstep-llm")
    except PackageNotFoundError:
        return "uninstalled"


def commit() -> str:
    """The commit of the source tree, or `unknown` outside a checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def write_failure(
    path: Path,
    workload: Workload,
    broken: LawBroken,
    seed: int | None,
    target: str,
    thorough: bool = True,
) -> None:
    """Writes a failure; `target` is the `module:factory` that it was found in."""
    record = {
        "format": FORMAT,
        "version": lockstep_version(),
        "commit": commit(),
        "python": platform.python_version(),
        "target": target,
        "seed": seed,
        "thorough": thorough,
        "law": broken.law,
        "detail": broken.detail,
        "vocabulary": workload.vocabulary,
        "config": asdict(workload.config),
        "operations": list(workload.operations),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(record, indent=1) + "\n")


def read_failure(path: Path) -> dict[str, Any]:
    """Reads a failure file of this version.

    Raises:
        InputError: it is not a failure file, or another version wrote it.
    """
    try:
        record = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not a failure file ({error})") from error
    if not isinstance(record, dict) or not str(record.get("format", "")).startswith("lockstep-"):
        raise InputError(f"{path}: not a failure file of lockstep")
    missing = {"version", "target", "config", "vocabulary", "operations"} - record.keys()
    if missing:
        raise InputError(f"{path}: the failure file lacks {', '.join(sorted(missing))}")
    if record["format"] != FORMAT or record["version"] != lockstep_version():
        raise InputError(
            f"{path}: written by lockstep {record['version']} ({record['format']}), this is "
            f"{lockstep_version()} ({FORMAT}); replay it with the version that wrote it"
        )
    return record


def workload_of(record: dict[str, Any]) -> Workload:
    """The workload of a failure record."""
    config = KernelConfig(**record["config"])
    return Workload(config, record["vocabulary"], tuple(record["operations"]))


def load_factory(target: str) -> Callable[..., Any]:
    """The object that `module:name` names.

    Raises:
        InputError: there is no such module or name.
    """
    module_name, _, name = target.partition(":")
    try:
        factory = getattr(import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"target {target!r}: {error}") from error
    if not callable(factory):
        raise InputError(f"target {target!r}: not callable")
    return factory  # type: ignore[no-any-return]


def failure_of(workload: Workload, factory: Factory, **options: Any) -> LawBroken | None:  # noqa: ANN401
    """The law that a workload breaks, if any; `options` are those of `run_workload`."""
    try:
        run_workload(workload, factory, **options)
    except LawBroken as broken:
        return broken
    return None


def shrink(workload: Workload, law: str, factory: Factory, **options: Any) -> Workload:  # noqa: ANN401
    """A smaller workload that breaks the same law: fewer operations, shorter requests."""
    rounds = 300

    def still_fails(operations: list[Operation]) -> bool:
        candidate = Workload(workload.config, workload.vocabulary, tuple(operations))
        broken = failure_of(candidate, factory, **options)
        return broken is not None and broken.law == law

    current = [list(operation) for operation in workload.operations]
    tries = 0
    progress = True
    while progress and tries < rounds:
        progress = False
        for candidate in _smaller(current):
            tries += 1
            if tries > rounds:
                break
            if still_fails(candidate):
                current = candidate
                progress = True
                break
    return Workload(workload.config, workload.vocabulary, tuple(current))


def _smaller(operations: list[Operation]) -> list[list[Operation]]:
    """Candidates, the most radical first."""
    candidates = []
    half = len(operations) // 2
    if half > 1:
        candidates += [operations[half:], operations[:half]]
    candidates += [operations[:i] + operations[i + 1 :] for i in range(len(operations))]
    for i, operation in enumerate(operations):
        if operation[0] != "add":
            continue
        spec = operation[1]
        changes: list[dict[str, Any]] = []
        if len(spec["prompt"]) > 1:
            changes.append({"prompt": spec["prompt"][:-1]})
        if spec["max_tokens"] > 1:
            changes.append({"max_tokens": spec["max_tokens"] - 1})
        changes += [
            {name: None} for name in ("stops", "min_tokens", "keys", "seed") if name in spec
        ]
        for change in changes:
            merged = {**spec, **change}
            slim = {name: value for name, value in merged.items() if value is not None}
            candidates.append([*operations[:i], ["add", slim], *operations[i + 1 :]])
    return candidates
