"""Runs the search against an adapter: every law that it breaks, each shrunk, in one run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from engine.core.config import KernelConfig
from properties.conformance.options import switched_off
from properties.conformance.protocol import (
    OPTIONAL,
    REQUIRED,
    AdapterCrash,
    AdapterProblem,
    ConfigurationRefused,
)
from properties.conformance.report import Finding, Report, describe, trace_of
from properties.conformance.target import AdapterTarget
from properties.conformance.workloads import adapter_workload
from properties.follower.follower import TIGHTNESS
from properties.follower.view import LawBroken, Target
from properties.laws import KERNEL_LAWS
from properties.search.failures import failure_of, shrink
from properties.search.run import run_workload
from properties.search.workloads import Workload

# Laws that speak of calls or states which adapters do not have.
NOT_JUDGED = frozenset({"B3", "B9", "B10", "C2", "K2", "K3", "S11", "E2", "E3"})
# Laws of a policy that adapters cannot name, and of steps in flight as our own kernel has them.
NOT_JUDGED |= {"S13", "S14", "A1", "A2", "A3", "A4"}
# One step ahead other systems may key, free and choose victims a step later than vLLM does.
SUSPENDED_IF_ASYNC = TIGHTNESS | {"K9", "B11", "S10", "L2"}
# Laws that say nothing where no prefix is ever shared.
OF_THE_CACHE = frozenset({f"K{number}" for number in range(1, 12)} | {"T1", "B11"})


def check_adapter(factory: Callable[[], Any], workloads: int = 2000, seed: int = 0) -> Report:
    """Runs random workloads and collects every broken law, until the adapter has a problem."""
    report = Report()
    try:
        adapter = _new(factory)
        suspended = _suspended(adapter, report)
    except AdapterProblem as problem:
        report.problem = problem
        return report
    check = _Check(factory, frozenset(suspended), report)
    for number in range(seed, seed + workloads):
        check.run(number, adapter_workload(number, adapter))
        if report.problem is not None:
            break
    return report


def assert_keeps_laws(factory: Callable[[], Any], workloads: int = 200, seed: int = 0) -> Report:
    """The kit as one line of a test: AssertionError with the report, or the report itself."""
    report = check_adapter(factory, workloads, seed)
    assert report.passed, describe(report)
    return report


class _Check:
    """One run of the kit: what was found so far is left out of what is looked for."""

    def __init__(
        self, factory: Callable[[], Any], suspended: frozenset[str], report: Report
    ) -> None:
        self._factory, self._suspended, self._report = factory, suspended, report

    def _target(self, config: KernelConfig) -> Target:
        return cast(Target, AdapterTarget(_new(self._factory), config))

    def run(self, seed: int, workload: Workload) -> None:
        """Runs a workload again and again, each time without the law that it broke."""
        report = self._report
        while True:
            left_out = self._suspended | set(report.broken_laws)
            try:
                follower = run_workload(workload, self._target, suspended=left_out, foreign=True)
            except LawBroken as broken:
                if not self._take(seed, workload, broken, left_out):
                    return
                continue
            report.workloads += 1
            report.steps += follower.ledger.steps
            return

    def _take(
        self, seed: int, workload: Workload, broken: LawBroken, left_out: frozenset[str]
    ) -> bool:
        """Books an alarm; whether the workload is worth another run."""
        report, cause = self._report, broken.__cause__
        if isinstance(cause, ConfigurationRefused):
            report.refused += 1
            return False
        if isinstance(cause, AdapterProblem):
            report.problem, report.problem_seed = cause, seed
            report.problem_workload = workload
            return False
        if broken.law in report.broken_laws:  # a crash, which cannot be left out
            return False
        if broken.law == "CRASH" and not isinstance(cause, AdapterCrash):
            if not report.findings:
                raise broken  # the kit itself is at fault
            return False  # after a law that was left out the picture may be nonsense
        options: dict[str, Any] = {"suspended": left_out, "foreign": True}
        small = shrink(workload, broken.law, self._target, **options)
        again = failure_of(small, self._target, **options) or broken
        first = failure_of(small, self._target, suspended=self._suspended, foreign=True)
        behind = (first.law,) if first is not None and first.law != broken.law else ()
        finding = Finding(broken.law, again.detail, seed, small, behind, trace_of(again))
        report.findings.append(finding)
        return broken.law != "CRASH"


def _new(factory: Callable[[], Any]) -> Any:  # noqa: ANN401
    try:
        adapter = factory()
    except Exception as error:
        raise AdapterProblem("factory()", f"raised {type(error).__name__}: {error}") from error
    missing = [name for name in REQUIRED if not callable(getattr(adapter, name, None))]
    if missing:
        raise AdapterProblem(f"{missing[0]}()", f"the adapter lacks {', '.join(missing)}")
    return adapter


def _suspended(adapter: Any, report: Report) -> set[str]:  # noqa: ANN401
    """Checks policy, options and opt-outs; notes in the report what is judged."""
    if getattr(adapter, "policy", None) not in ("mixed", "prefill_first"):
        raise AdapterProblem("policy", "must be 'mixed' or 'prefill_first'")
    opt_out = set(getattr(adapter, "opt_out", ()))
    unknown = opt_out - {law.id for law in KERNEL_LAWS}
    if unknown:
        raise AdapterProblem("opt_out", f"unknown laws {', '.join(sorted(map(str, unknown)))}")
    adapter_workload(0, adapter)
    suspended = opt_out | NOT_JUDGED
    for call, laws in OPTIONAL.items():
        if not hasattr(adapter, call):
            suspended |= laws
    if getattr(adapter, "asynchronous", False):
        suspended |= SUSPENDED_IF_ASYNC
    report.opted_out = sorted(opt_out)
    judged = [law.id for law in KERNEL_LAWS if law.id not in suspended]
    report.caching_off = switched_off(adapter.kernel_options)
    if report.caching_off:
        report.not_exercised = [law for law in judged if law in OF_THE_CACHE]
    report.judged = [law for law in judged if law not in report.not_exercised]
    if not report.judged:
        raise AdapterProblem("opt_out", "leaves no law to judge")
    return suspended
