"""`python -m properties.mutation`: runs mutmut on the kernel and writes the record.

Mutmut works in a copy of what it needs, in out/mutation, and goes on there if it was stopped.
`--files step plan` mutates some files only, in a folder of their own, and leaves the record alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path

from properties.mutation.changes import change_in
from properties.mutation.equivalents import EQUIVALENT
from properties.mutation.getters import as_functions
from properties.search.failures import commit

ROOT = Path(__file__).resolve().parents[2]
MUTATED = (
    "block_manager",
    "block_pool",
    "decode_set",
    "free_list",
    "hashing",
    "lifecycle",
    "plan",
    "policies",
    "scheduler",
    "sequence",
    "state",
    "step",
)
TESTS = ("test_decode_runs", "test_plans", "test_scenarios", "test_scheduler")  # of tests/core
KILLED = ("killed", "timeout", "segfault")
RECORD = ROOT / "properties" / "records" / "mutation.json"
SETTINGS = """[mutmut]
source_paths=engine
only_mutate=
{mutated}
also_copy=
    properties
    conftest.py
pytest_add_cli_args=
    -q
    -x
    -p
    no:randomly
    -p
    no:cacheprovider
pytest_add_cli_args_test_selection=
    properties/mutation/killers.py
    properties/tests/test_horizon.py
{tests}
timeout_multiplier=4.0
timeout_constant=5.0
use_git_change_detection=false
do_not_mutate_patterns=
    ^\\s*assert
"""


def prepare(folder: Path, files: Collection[str]) -> None:
    """Copies kernel and suite, and writes mutmut's settings."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("engine/core", "properties"):
        shutil.copytree(
            ROOT / name,
            folder / name,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    (folder / "tests" / "core").mkdir(parents=True, exist_ok=True)
    tests = [f"tests/core/{name}.py" for name in TESTS]
    for name in tests:
        shutil.copy(ROOT / name, folder / name)
    shutil.copy(ROOT / "engine" / "__init__.py", folder / "engine" / "__init__.py")
    for name in files:
        path = folder / "engine" / "core" / f"{name}.py"
        path.write_text(as_functions(path.read_text()))
    mutated = "\n".join(f"    engine/core/{name}.py" for name in files)
    selection = "\n".join(f"    {name}" for name in tests)
    (folder / "setup.cfg").write_text(SETTINGS.format(mutated=mutated, tests=selection))
    shutil.copy(Path(__file__).with_name("patience.py"), folder / "conftest.py")
    (folder / "commit.txt").write_text(commit())


def outcomes(folder: Path) -> dict[str, str]:
    """Mutant name -> what became of it."""
    listed = subprocess.run(
        [sys.executable, "-m", "mutmut", "results", "--all", "true"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    found = {}
    for line in listed.stdout.splitlines():
        name, _, status = line.strip().rpartition(": ")
        if name:
            found[name] = status
    return found


def change_of(folder: Path, name: str) -> tuple[str, str, str]:
    """What a mutant changes: function, lines before and after."""
    shown = subprocess.run(
        [sys.executable, "-m", "mutmut", "show", name],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return change_in(name, shown.stdout)


def add_wall_time(folder: Path, seconds: float = 0.0) -> float:
    """Seconds that all runs in a folder took together."""
    path = folder / "wall_s.txt"
    total = seconds + (float(path.read_text()) if path.exists() else 0.0)
    path.write_text(f"{total:.1f}\n")
    return total


def report(
    folder: Path, files: Collection[str], jobs: int, later: Path | None = None
) -> dict[str, object]:
    """The record: counts, the raw score, and the score without justified equivalents.

    `later` is the folder of a run that tried survivors again with tests that came after `folder`'s;
    those it kills are named apart and count in `adjusted_score` only.
    """
    found = outcomes(folder)
    counts = Counter(found.values())
    killed = sum(counts[status] for status in KILLED)
    alive = [name for name, status in found.items() if status in ("survived", "no tests")]
    changes = {name: change_of(folder, name) for name in sorted(alive)}
    equivalent = {
        name: EQUIVALENT[change] for name, change in changes.items() if change in EQUIVALENT
    }
    holes = {
        name: " -> ".join(change[1:]) for name, change in changes.items() if name not in equivalent
    }
    again = outcomes(later) if later else {}
    closed = {name: holes.pop(name) for name in [*holes] if again.get(name) in KILLED}
    judged = killed + len(alive)
    record: dict[str, object] = {
        "command": "make mutate",
        "commit": (folder / "commit.txt").read_text().strip(),
        "python": platform.python_version(),
        "mutmut": version("mutmut"),
        "files": [f"engine/core/{name}.py" for name in files],
        "jobs": jobs,
        "wall_s": round(add_wall_time(folder)),
        "mutants": len(found),
        "judged": judged,
        "outcomes": dict(counts),
        "killed": killed,
        "raw_score": round(killed / max(1, judged), 4),
        "equivalent": equivalent,
        "adjusted_score": round((killed + len(closed)) / max(1, judged - len(equivalent)), 4),
        "survivors": holes,
    }
    if later:
        commit_later = (later / "commit.txt").read_text().strip()
        record["killed_later"] = {"commit": commit_later, "mutants": closed}
    return record


def run(folder: Path, files: Collection[str], jobs: int, names: Collection[str]) -> None:
    """Runs mutmut on `names`, or on whatever it has not judged yet."""
    prepare(folder, files)
    began = time.monotonic()
    try:
        subprocess.run(
            [sys.executable, "-m", "mutmut", "run", "--max-children", str(jobs), *names],
            cwd=folder,
            check=True,
        )
    finally:
        add_wall_time(folder, time.monotonic() - began)


def main() -> int:
    """Runs mutmut and reports; exit code 1 if a mutant survived without a justification."""
    parser = argparse.ArgumentParser(prog="python -m properties.mutation")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, help="default: out/mutation, one more per --files")
    parser.add_argument("--files", nargs="+", choices=MUTATED, default=list(MUTATED))
    parser.add_argument("--only-report", action="store_true", help="write the record again")
    parser.add_argument("--later", type=Path, help="folder of a run that tried survivors again")
    parser.add_argument("--retry", action="store_true", help="run what is not killed yet again")
    parser.add_argument("--names", nargs="*", default=[], help="mutants to run, default: all")
    args = parser.parse_args()
    is_whole = set(args.files) == set(MUTATED)
    suffix = "" if is_whole else "-" + "-".join(sorted(args.files))
    folder = args.folder or ROOT / "out" / f"mutation{suffix}"
    if args.retry:
        last = outcomes(folder)
        args.names = [name for name, status in last.items() if status not in KILLED]
    if not args.only_report:
        run(folder, args.files, args.jobs, args.names)
    record = report(folder, args.files, args.jobs, args.later)
    path = RECORD if is_whole else folder / "record.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    survivors = record["survivors"]
    assert isinstance(survivors, dict)
    print(
        f"{record['killed']} of {record['judged']} mutants killed (raw {record['raw_score']:.1%}, "
        f"without equivalents {record['adjusted_score']:.1%}); {path}"
    )
    for name, change in survivors.items():
        print(f"alive: {name}: {change}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
