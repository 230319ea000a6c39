"""What the kit found, and the report in words."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field

from properties.conformance.protocol import AdapterCrash, AdapterProblem
from properties.follower.view import LawBroken, law_name
from properties.search.workloads import Workload


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken law, or a crash (law `CRASH`), with the smallest workload that shows it.

    `behind` are laws that this workload breaks first; they were left out to see this one, which
    may be their consequence.
    """

    law: str
    detail: str
    seed: int
    workload: Workload
    behind: tuple[str, ...] = ()
    trace: str = ""


@dataclass(slots=True)
class Report:
    """What the kit found; it passes only if workloads ran and nothing was wrong with any."""

    workloads: int = 0
    refused: int = 0
    steps: int = 0
    judged: list[str] = field(default_factory=list)
    opted_out: list[str] = field(default_factory=list)
    not_exercised: list[str] = field(default_factory=list)
    caching_off: bool = False
    findings: list[Finding] = field(default_factory=list)
    problem: AdapterProblem | None = None
    problem_seed: int | None = None
    problem_workload: Workload | None = None

    @property
    def passed(self) -> bool:
        """Whether the scheduler conforms, as far as it was judged."""
        return self.problem is None and not self.findings and self.steps > 0

    @property
    def broken_laws(self) -> list[str]:
        """Ids of the broken laws, in the order in which they were found."""
        return [finding.law for finding in self.findings]


def trace_of(broken: LawBroken) -> str:
    """The traceback of a crash inside the scheduler, from its adapter on; else nothing."""
    crash = broken.__cause__
    if not isinstance(crash, AdapterCrash) or crash.__cause__ is None:
        return ""
    error = crash.__cause__
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return "".join(traceback.format_exception(type(error), error, frames, chain=False))


def describe(report: Report) -> str:
    """The report as text."""
    lines = [f"{report.workloads} workloads, {report.steps} steps"]
    if report.refused:
        lines.append(f"{report.refused} configurations were refused by start()")
    lines.append("judged: " + " ".join(map(law_name, report.judged)))
    if report.opted_out:
        lines.append("opted out by the adapter: " + " ".join(map(law_name, report.opted_out)))
    if report.caching_off:
        lines.append(
            "prefix caching is off (kernel_options), so these had nothing to judge: "
            + " ".join(map(law_name, report.not_exercised))
        )
    if report.problem is not None:
        lines.append(f"ADAPTER PROBLEM in {report.problem}")
        if report.problem_workload is not None:
            lines += _workload_lines(report.problem_seed, report.problem_workload)
    for finding in report.findings:
        lines += _finding_lines(finding)
    if report.passed:
        lines.append("all judged laws are kept")
    elif report.problem is None and not report.findings:
        lines.append("NOTHING WAS JUDGED: no step was scheduled")
    elif report.findings:
        broken = " ".join(map(law_name, report.broken_laws))
        lines.append(f"broken: {broken}")
    return "\n".join(lines)


def _finding_lines(finding: Finding) -> list[str]:
    if finding.law == "CRASH":
        lines = [f"CRASHES: {finding.detail}", *finding.trace.rstrip().splitlines()]
    else:
        lines = [f"BREAKS {law_name(finding.law)}: {finding.detail}"]
    if finding.behind:
        names = " ".join(map(law_name, finding.behind))
        lines.append(f"  (seen once {names} is left out; it may be a consequence)")
    return lines + _workload_lines(finding.seed, finding.workload)


def _workload_lines(seed: int | None, workload: Workload) -> list[str]:
    lines = [f"  seed {seed}, {workload.config}"]
    if not workload.config.enable_prefix_caching:
        lines.append("  (the kit has turned prefix caching off in this workload)")
    return lines + [f"  {operation}" for operation in workload.operations]
