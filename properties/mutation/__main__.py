"""`python -m properties.mutation SCOPE`: how much of the code could be wrong unnoticed.

Judges every mutant of the scope by its killing tests and writes the record. `--files` takes some
modules only, `--again` those that survived in an earlier result; both leave the record alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from properties.mutation.equivalents import EQUIVALENT
from properties.mutation.forking import SURVIVED, ForkingLoop, Judgement
from properties.mutation.planting import Mutant, mutants_of
from properties.search.failures import commit

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "properties" / "records"


@dataclass(frozen=True, slots=True)
class Scope:
    """What is changed, and the tests that must notice; the record keeps both."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    deselected: str = ""


_CORE = ("block_manager", "block_pool", "decode_set", "free_list", "hashing", "lifecycle", "plan",
         "policies.mixed", "policies.policy", "policies.prefill_first", "policies.priority",
         "scheduler", "sequence", "state", "step", "tokens", "views", "waiting")  # fmt: skip
_FACADE = ("llm", "requests.live", "requests.registry", "requests.stream", "step.builder",
           "step.loop")  # fmt: skip
SCOPES = {
    "kernel": Scope(
        tuple([f"engine.core.{name}" for name in _CORE]),
        (
            "properties/mutation/killers.py",
            "properties/tests/test_horizon.py",
            "properties/tests/test_sizes.py",
            *[f"tests/engine/core/test_{name}.py" for name in (
                "block_pool", "decode_runs", "plans", "rare_keys", "rare_steps", "scenarios",
                "scheduler", "tokens")],
        ),
        "server",
    ),
    "facade": Scope(
        tuple([f"engine.{name}" for name in _FACADE]),
        (
            "tests/engine/test_facade_law.py",
            "tests/engine/test_facade_defects.py",
            "tests/engine/requests",
        ),
        "real_engine or every_line or replays or is_found or gpu",
    ),
}  # fmt: skip


def mutants_in(modules: Sequence[str]) -> list[Mutant]:
    """All mutants of some modules."""
    found: list[Mutant] = []
    for module in modules:
        found += mutants_of(module, ROOT / f"{module.replace('.', '/')}.py")
    return found


def judge(scope: Scope, mutants: Sequence[Mutant], jobs: int, seconds: float) -> list[Judgement]:
    """Runs the suite against the mutants."""
    judged: list[Judgement] = []

    def note(judgement: Judgement) -> None:
        judged.append(judgement)
        if len(judged) % 100 == 0:
            alive = sum([one.by == SURVIVED for one in judged])
            print(f"{len(judged)} of {len(mutants)} judged, {alive} alive", flush=True)

    loop = ForkingLoop(mutants, jobs, time.monotonic() + seconds, note)
    files = [str(ROOT / name) for name in scope.tests]
    quiet = [f"-pno:{name}" for name in ("terminal", "cacheprovider", "xdist")] + ["-otimeout=0"]
    quiet += ["-W", "ignore:This process"]  # forks and threads of libraries do not disturb
    chosen = ["-m", "not nightly", "-k", f"not ({scope.deselected})"]
    status = pytest.main([*quiet, *chosen, f"--rootdir={ROOT}", *files], plugins=[loop])
    if not judged and mutants:
        raise SystemExit(f"nothing was judged (pytest: {status})")
    return judged


def summary(name: str, judged: Sequence[Judgement], left: int, seconds: float) -> dict[str, Any]:
    """Counts, survivors by justification, and who killed how many."""
    alive = [one for one in judged if one.by == SURVIVED]
    equal = [one for one in alive if one.mutant.change.key in EQUIVALENT]
    holes = [one for one in alive if one.mutant.change.key not in EQUIVALENT]
    by_test = Counter(
        one.by.rpartition("::")[2].partition("[")[0] for one in judged if one.by != SURVIVED
    )
    by_operator = Counter(one.mutant.change.operator for one in judged)
    killed = len(judged) - len(alive)
    return {
        "command": f"python -m properties.mutation {name}",
        "commit": commit(),
        "python": platform.python_version(),
        "seconds": round(seconds),
        "mutants": len(judged) + left,
        "judged": len(judged),
        "killed": killed,
        "raw_score": round(killed / max(1, len(judged)), 4),
        "equivalent": len(equal),
        "adjusted_score": round(killed / max(1, len(judged) - len(equal)), 4),
        "operators": dict(by_operator.most_common()),
        "killed_by": dict(by_test.most_common()),
        "survivors": [_told(one) for one in holes],
        "justified": [{**_told(one), "why": EQUIVALENT[one.mutant.change.key]} for one in equal],
    }


def _told(judgement: Judgement) -> dict[str, Any]:
    change = judgement.mutant.change
    return {
        "mutant": judgement.mutant.name,
        "function": change.function,
        "before": change.before,
        "after": change.after,
    }


def _survivors_of(path: Path) -> set[tuple[str, str, str]]:
    found = json.loads(path.read_text())["survivors"]
    return {(one["function"], one["before"], one["after"]) for one in found}


def joined(mutants: Sequence[Mutant], parts: Sequence[Path]) -> list[Judgement]:
    """What earlier runs found of these mutants; of two outcomes the later part's counts."""
    found: dict[tuple[str, ...], str] = {}
    for part in parts:
        for *key, by in json.loads(part.read_text()):
            found[tuple(key)] = by
    return [Judgement(m, found[m.change.key], 0.0) for m in mutants if m.change.key in found]


def main() -> int:
    """Judges and reports; exit code 1 if a mutant survived without a justification."""
    parser = argparse.ArgumentParser(prog="python -m properties.mutation")
    parser.add_argument("scope", choices=[*SCOPES])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--files", nargs="+", help="ends of modules' names, default: all")
    parser.add_argument("--again", type=Path, help="only survivors of this result")
    parser.add_argument("--without", type=Path, nargs="+", help="outcomes of parts judged before")
    parser.add_argument("--every", type=int, default=1, help="every n-th mutant only")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time")
    parser.add_argument("--outcomes", type=Path, help="where each mutant's outcome goes")
    parser.add_argument("--join", type=Path, nargs="+", help="outcomes of earlier parts, to sum up")
    parser.add_argument("--out", type=Path, help="where the result goes instead of the record")
    args = parser.parse_args()
    scope = SCOPES[args.scope]
    modules = [m for m in scope.modules if not args.files or m.endswith(tuple(args.files))]
    mutants = mutants_in(modules)
    if args.again:
        known = _survivors_of(args.again)
        mutants = [mutant for mutant in mutants if mutant.change.key in known]
    if args.without:
        judged_before = {one.mutant.change.key for one in joined(mutants, args.without)}
        mutants = [mutant for mutant in mutants if mutant.change.key not in judged_before]
    # Spread over the files, so that a run that is cut short has seen all of them.
    mutants = [mutants[place] for start in range(97) for place in range(start, len(mutants), 97)]
    mutants = mutants[:: args.every]
    began = time.monotonic()
    if args.join:
        judged = joined(mutants, args.join)
    else:
        judged = judge(scope, mutants, args.jobs, args.seconds)
    if args.out is None and args.join:
        args.out = RECORDS / f"mutation_{args.scope}.json"
    result = summary(args.scope, judged, len(mutants) - len(judged), time.monotonic() - began)
    chosen = (args.files, args.again, args.without, args.every > 1, args.seconds < 1e8)
    is_whole = not any(chosen)
    default = RECORDS / f"mutation_{args.scope}.json" if is_whole else None
    out = args.out or default
    if out is not None:
        out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    if args.outcomes:
        found = [[*one.mutant.change.key, one.by] for one in judged]
        args.outcomes.write_text(json.dumps(found, indent=0) + "\n")
    for one in result["survivors"]:
        print(f"alive: {one['mutant']}: {one['before']} -> {one['after']}")
    print(
        f"{result['killed']} of {result['judged']} mutants killed (raw {result['raw_score']:.1%}, "
        f"without equivalents {result['adjusted_score']:.1%}) in {result['seconds']} s"
    )
    return 1 if result["survivors"] else 0


if __name__ == "__main__":
    sys.exit(main())
