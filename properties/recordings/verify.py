"""`lockstep verify decisions`: the kernel against the recorded decisions of real systems."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from pathlib import Path

from engine.arguments.parser import VerbParser
from engine.core.errors import ConfigError, KernelBug, LockstepError, RequestRejected
from engine.core.request import RequestId
from properties.defects.by_priority import KeepsWithdrawnKeys
from properties.recordings.async_run import AsyncRun
from properties.recordings.nano_twin import CONDITION, twin_steps
from properties.recordings.recording import (
    SchedulerOf,
    Step,
    Workload,
    read_workloads,
    run_workload,
)

# Each level also demands the ones above it. Of `admitted`, the second level compares the id and
# the hit tokens, the third also where the hit blocks were.
LEVELS: dict[str, tuple[str, ...]] = {
    "decisions": (
        *("step", "arrived", "scheduled", "flush", "in_flight", "batch", "known", "samples"),
        *("preempted", "updated", "dropped", "stale", "finished"),
    ),
    "cache effect": ("hits", "finish_reasons", "kind", "free_blocks", "free_blocks_after"),
    "exact blocks": (
        *("admitted", "new_blocks", "waiting", "running", "free_order"),
        *("waiting_after", "running_after", "free_order_after"),
    ),
}
WITHDRAWN_KEYS = "keys of a withdrawn entry"
EQUAL, SET_ASIDE, DIFFERENT = "equal", "set aside", "different"
# Far beyond what any workload of this format needs; reached only by a run that gets nowhere.
_MOST_STEPS = 100_000


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a workload first differs at one level; a step is None if that side had ended."""

    index: int
    level: str
    field: str
    expected: Step | None
    got: Step | None
    error: str = ""

    def __str__(self) -> str:
        clock = (self.expected or self.got or {}).get("step")
        lines = [f"step {clock} (recorded step no. {self.index}), field {self.field!r}:"]
        if self.error:
            lines.append(f"  the kernel failed: {self.error}")
        elif self.expected and self.got and self.field in self.expected:
            lines.append(f"  expected {self.field}: {_dump(self.expected[self.field])}")
            lines.append(f"  got      {self.field}: {_dump(self.got[self.field])}")
        lines.append(f"  expected step: {_dump(self.expected)}")
        lines.append(f"  got step:      {_dump(self.got)}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one workload compares, per level."""

    workload: str
    family: str
    status: dict[str, str]
    differences: dict[str, Difference]
    condition: str = ""  # what explains the levels that are set aside


@dataclass(slots=True)
class FileReport:
    """What a file of workloads came to."""

    path: Path
    num_workloads: int = 0
    counts: dict[str, Counter[str]] = field(
        default_factory=lambda: {level: Counter() for level in LEVELS}
    )
    conditions: Counter[str] = field(default_factory=Counter)
    impossible: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    # The workload that told a recording of vLLM before 0.33 by its rule P-R1, "" if none did.
    older_rule: str = ""


def compare(workload: Workload, scheduler_of: SchedulerOf) -> Verdict:
    """Runs one recorded workload through a scheduler and compares every step."""
    differences = _first_differences(workload, scheduler_of)
    status = dict.fromkeys(LEVELS, EQUAL)
    if differences:
        # Up to the first difference the recorded state is the kernel's, so the condition must
        # hold in that very step to explain it; what follows at other levels is its consequence.
        first = min(difference.index for difference in differences.values())
        condition = CONDITION if first in twin_steps(workload) else _withdrawn_keys(workload)
        for level in differences:
            status[level] = SET_ASIDE if condition else DIFFERENT
        return Verdict(workload.name, workload.group, status, differences, condition)
    return Verdict(workload.name, workload.group, status, differences)


def _withdrawn_keys(workload: Workload) -> str:
    """The name of vLLM's defect if a kernel that has it makes exactly the recorded decisions.

    Keys of an entry that is withdrawn in its own step stay, so later hits may find blocks that
    were never written (vLLM 0.25.1 and 0.33.0, policy `priority` with a threshold).
    """
    if workload.policy != "priority" or _first_differences(workload, KeepsWithdrawnKeys):
        return ""
    return WITHDRAWN_KEYS


def _first_differences(workload: Workload, scheduler_of: SchedulerOf) -> dict[str, Difference]:
    found: dict[str, Difference] = {}
    levels = list(LEVELS)
    index = -1
    try:
        scheduler = scheduler_of(workload.kernel_config())
        if workload.is_async:
            run = AsyncRun(workload, scheduler).calls()
        else:
            run = run_workload(workload, scheduler)
        # One step more than recorded shows a run that goes on too long.
        ours = islice(run, len(workload.steps) + 1)
        for index, (expected, got) in enumerate(zip_longest(workload.steps, ours)):
            for place, level in enumerate(levels):
                name = None if level in found else _other_field(expected, got, LEVELS[level])
                if name is not None:
                    for lower in levels[place:]:
                        found.setdefault(lower, Difference(index, level, name, expected, got))
            if levels[0] in found:
                break
    except Exception as error:
        # A replay of foreign decisions must report what the kernel does, whatever it does.
        expected = workload.steps[min(index + 1, len(workload.steps) - 1)]
        failed = Difference(index + 1, levels[0], "exception", expected, None, repr(error))
        for level in levels:
            found.setdefault(level, failed)
    return found


def _other_field(expected: Step | None, got: Step | None, names: Iterable[str]) -> str | None:
    if expected is None or got is None:
        return "number of steps"
    for name in names:
        if name == "hits":
            if [a[:2] for a in expected["admitted"]] != [a[:2] for a in got["admitted"]]:
                return "admitted"
        elif name in expected and expected[name] != got[name]:
            return name
    return None


def run_impossible(workload: Workload, scheduler_of: SchedulerOf) -> str:
    """Runs a workload that the recorded system could not finish, with all hardening on.

    Returns:
        How it ended: refused configuration, rejected requests, or completed.

    Raises:
        LockstepError: it neither was refused nor completed.
    """
    try:
        scheduler = scheduler_of(workload.kernel_config(hardened=True))
    except ConfigError:
        return "configuration refused"
    rejections: list[RequestRejected] = []
    ended: set[RequestId] = set()
    for number, step in enumerate(run_workload(workload, scheduler, rejections)):
        ended.update(step["finished"])
        if number > _MOST_STEPS:
            raise LockstepError(f"no end after {number} steps")
    refused = {rejection.request_id for rejection in rejections}
    lost = {item.request.request_id for item in workload.requests} - refused - ended
    if lost:
        raise LockstepError(f"requests {sorted(map(str, lost))} never ended")
    if scheduler.num_free_blocks != workload.kernel_config(hardened=True).num_blocks:
        raise KernelBug("L5", "blocks are in use after the last request")
    reasons = sorted({rejection.reason for rejection in rejections})
    return f"rejected ({', '.join(reasons)}), rest completed" if reasons else "completed"


def verify_file(path: Path, scheduler_of: SchedulerOf, every: int = 1) -> FileReport:
    """Compares every n-th workload of a file."""
    report = FileReport(path)
    for workload in islice(read_workloads(path), 0, None, every):
        report.num_workloads += 1
        if workload.is_recording:
            _add_verdict(report, _compare_by_version(report, workload, scheduler_of))
            continue
        try:
            report.impossible[workload.group, run_impossible(workload, scheduler_of)] += 1
        except Exception as error:
            report.impossible[workload.group, "failed"] += 1
            report.failures.append(f"{workload.name} ({workload.group}): {error!r}")
    return report


def _compare_by_version(
    report: FileReport, workload: Workload, scheduler_of: SchedulerOf
) -> Verdict:
    """By today's rules, or by those before vLLM 0.33 once a workload of the file has told so.

    A file does not say which version made it. Of one policy, rule P-R1 alone is different, and
    only a threshold brings it out; one version must explain the whole file.
    """
    older = replace(workload, threshold_when_alone=True)
    if report.older_rule:
        return compare(older, scheduler_of)
    verdict = compare(workload, scheduler_of)
    if workload.policy == "prefill_first" or DIFFERENT not in verdict.status.values():
        return verdict
    if not workload.config.get("long_prefill_token_threshold", 0):
        return verdict
    by_older = compare(older, scheduler_of)
    if DIFFERENT not in by_older.status.values():
        report.older_rule = workload.name
        return by_older
    return verdict


def _add_verdict(report: FileReport, verdict: Verdict) -> None:
    for level, status in verdict.status.items():
        report.counts[level][status] += 1
    if SET_ASIDE in verdict.status.values():
        report.conditions[verdict.condition] += 1
    for level, status in verdict.status.items():
        if status == DIFFERENT:
            difference = verdict.differences[level]
            where = f"workload {verdict.workload} ({verdict.family}), level {level!r}"
            report.failures.append(f"{where}, {difference}")
            return


def render(report: FileReport) -> str:
    """The report as text: a table per level, the conditions, the first difference in full."""
    lines = [f"{report.path}: {report.num_workloads} workloads"]
    if any(report.counts.values()):
        lines.append(f"  {'level':<14}{EQUAL:>8}{SET_ASIDE:>12}{DIFFERENT:>12}")
        for level, counts in report.counts.items():
            columns = f"{counts[EQUAL]:>8}{counts[SET_ASIDE]:>12}{counts[DIFFERENT]:>12}"
            lines.append(f"  {level:<14}{columns}")
    if report.older_rule:
        lines.append(
            f"  made by vLLM before 0.33, as {report.older_rule} tells: a lone request keeps to the"
            " threshold (threshold_when_alone)"
        )
    lines += [f"  set aside by {name}: {count}" for name, count in report.conditions.items()]
    for (kind, outcome), count in sorted(report.impossible.items()):
        lines.append(f"  {kind:<18}{count:>4} {outcome}")
    if report.failures:
        lines.append(f"  first of {len(report.failures)} differing workloads:")
        lines += [f"    {line}" for line in report.failures[0].splitlines()]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Command line of `lockstep verify decisions`."""
    parser = VerbParser(
        "verify decisions",
        "Run recorded workloads through the kernel and compare every decision.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="recording")
    parser.option("every", 1)
    parser.option("json")
    options = parser.parse(argv)
    from engine.core import Scheduler

    reports = []
    for path in options.files:
        report = verify_file(path, Scheduler, options.every)
        reports.append(report)
        if not options.json:
            print(render(report))
            sys.stdout.flush()
    if options.json:
        print(json.dumps({"files": [document(report) for report in reports]}, indent=1))
    return int(any(report.failures for report in reports))


def document(report: FileReport) -> dict[str, object]:
    """The report as JSON data."""
    return {
        "file": str(report.path),
        "workloads": report.num_workloads,
        "levels": {
            level: {outcome: counts[outcome] for outcome in (EQUAL, SET_ASIDE, DIFFERENT)}
            for level, counts in report.counts.items()
            if counts
        },
        "set_aside_by": dict(report.conditions),
        "impossible": [
            {"kind": kind, "outcome": outcome, "workloads": count}
            for (kind, outcome), count in sorted(report.impossible.items())
        ],
        "failures": report.failures,
    }


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
