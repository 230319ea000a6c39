"""Runs Spin on the model: checks, shortest witnesses, and the whole graph of calls."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from properties.models.calls import Call, read_calls
from properties.models.replay import Scope

FOLDER = Path(__file__).parent
MODEL = "async_kernel.pml"
FILES = (MODEL, "async_kernel_show.pml")
_COUNTS = {
    "states": r"^ *(\d+) states, stored",
    "transitions": r"^ *(\d+) transitions",
    "depth": r"depth reached (\d+)",
    "errors": r"errors: (\d+)",
}


@dataclass(frozen=True)
class Check:
    """What one run of the checker found."""

    states: int
    transitions: int
    depth: int
    errors: int
    seconds: float
    violated: str  # the sentence, if there was an error

    def to_json(self) -> dict[str, object]:
        """For the record."""
        return dict(vars(self))


def tools_missing() -> list[str]:
    """The programs that the checker needs and that are not there."""
    return [name for name in ("spin", "gcc") if shutil.which(name) is None]


def spin_version() -> str:
    """As Spin says it."""
    return _run(["spin", "-V"], FOLDER).strip()


def check(folder: Path, scope: Scope, defect: int = 0) -> Check:
    """Every reachable state: the assertions, and that every run comes to its end."""
    _build(folder, [*scope.macros(), f"-DDEFECT={defect}"], [])
    return _check_of(_run(["./pan", "-a", "-m200000"], folder))


def witness(folder: Path, scope: Scope, event: str) -> list[Call]:
    """The shortest run that meets an event; empty if there is none."""
    macros = [*scope.macros(), f"-DTRAP={event.upper()}"]
    _build(folder, macros, ["-DBFS", "-DSAFETY", "-DNOCLAIM"])
    if not _check_of(_run(["./pan", "-m200000"], folder)).errors:
        return []
    printed = _run(["spin", "-t", "-T", *macros, MODEL], folder)
    return list(read_calls(printed.splitlines()))


def graph(folder: Path, scope: Scope) -> Iterator[Call]:
    """Every transition between reachable states, in the order of a depth-first search."""
    options = ["-DSAFETY", "-DNOCLAIM", "-DNOREDUCE", "-DPRINTF"]
    _build(folder, [*scope.macros(), "-DGRAPH"], options)
    with subprocess.Popen(
        ["./pan", "-E", "-m200000"], cwd=folder, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield from read_calls(process.stdout)


def events() -> list[str]:
    """The events that the model names."""
    text = (FOLDER / FILES[1]).read_text()
    names = re.search(r"mtype = \{ NOTHING, ([^}]*)\}", text)
    assert names is not None
    return [name.lower() for name in re.findall(r"\w+", names[1])]


def _build(folder: Path, macros: list[str], options: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copy(FOLDER / name, folder / name)
    _run(["spin", *macros, "-a", MODEL], folder)
    _run(["gcc", "-O2", "-w", *options, "-o", "pan", "pan.c"], folder)


def _run(words: list[str], folder: Path) -> str:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    return done.stdout + done.stderr


def _check_of(printed: str) -> Check:
    counts = {}
    for name, pattern in _COUNTS.items():
        found = re.search(pattern, printed, re.MULTILINE)
        if found is None:
            raise RuntimeError(f"the checker did not finish:\n{printed[-2000:]}")
        counts[name] = int(found[1])
    seconds = re.search(r"elapsed time ([\d.e+-]+)", printed)
    violated = re.search(r"^pan:\d+: (.*)$", printed, re.MULTILINE)
    return Check(
        **counts,
        seconds=float(seconds[1]) if seconds else 0.0,
        violated=violated[1] if violated else "",
    )
