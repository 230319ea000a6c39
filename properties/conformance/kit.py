"""Runs the search against an adapter and says which laws were judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from engine.core.config import KernelConfig
from properties.conformance.protocol import REQUIRED, AdapterProblem
from properties.conformance.target import AdapterTarget
from properties.follower.view import LawBroken, Target, law_name
from properties.laws import KERNEL_LAWS
from properties.search.failures import failure_of, shrink
from properties.search.run import run_workload
from properties.search.workloads import Workload, random_workload

# Laws that speak of calls or states which adapters do not have.
NOT_JUDGED = frozenset({"B3", "B9", "B10", "C2", "K2", "K3", "K11", "S11", "E2", "E3"})


@dataclass(slots=True)
class Report:
    """What the kit found; it passes only with workloads run, no problem and no broken law."""

    workloads: int = 0
    steps: int = 0
    judged: list[str] = field(default_factory=list)
    opted_out: list[str] = field(default_factory=list)
    problem: AdapterProblem | None = None
    broken: LawBroken | None = None
    seed: int | None = None
    workload: Workload | None = None

    @property
    def passed(self) -> bool:
        """Whether the scheduler conforms, as far as it was judged."""
        return self.problem is None and self.broken is None and self.steps > 0


def check_adapter(factory: Callable[[], Any], workloads: int = 2000, seed: int = 0) -> Report:
    """Runs random workloads until one breaks a law or shows a problem of the adapter."""
    report = Report()
    try:
        adapter = _new(factory)
        opt_out = _attributes(adapter)
    except AdapterProblem as problem:
        report.problem = problem
        return report
    report.opted_out = sorted(opt_out)
    suspended = opt_out | NOT_JUDGED
    if not hasattr(adapter, "free_blocks"):
        suspended |= {"B2", "K9", "K10", "B11"}
    if not hasattr(adapter, "abort"):
        suspended |= {"L8"}
    report.judged = [law.id for law in KERNEL_LAWS if law.id not in suspended]

    def target(config: KernelConfig) -> Target:
        return cast(Target, AdapterTarget(_new(factory), config))

    for number in range(seed, seed + workloads):
        workload = _workload(number, adapter)
        try:
            follower = run_workload(workload, target, suspended=frozenset(suspended))
        except LawBroken as broken:
            report.seed = number
            if isinstance(broken.__cause__, AdapterProblem):
                report.problem, report.workload = broken.__cause__, workload
                return report
            small = shrink(workload, broken.law, target, suspended=frozenset(suspended))
            again = failure_of(small, target, suspended=frozenset(suspended))
            report.broken, report.workload = again or broken, small
            return report
        report.workloads += 1
        report.steps += follower.ledger.steps
    return report


def _new(factory: Callable[[], Any]) -> Any:  # noqa: ANN401
    try:
        adapter = factory()
    except Exception as error:
        raise AdapterProblem("factory()", f"raised {type(error).__name__}: {error}") from error
    missing = [name for name in REQUIRED if not callable(getattr(adapter, name, None))]
    if missing:
        raise AdapterProblem(f"{missing[0]}()", f"the adapter lacks {', '.join(missing)}")
    return adapter


def _attributes(adapter: Any) -> frozenset[str]:  # noqa: ANN401
    """Checks policy, options and opt-outs; returns the latter."""
    if getattr(adapter, "policy", None) not in ("mixed", "prefill_first"):
        raise AdapterProblem("policy", "must be 'mixed' or 'prefill_first'")
    opt_out = frozenset(getattr(adapter, "opt_out", ()))
    unknown = opt_out - {law.id for law in KERNEL_LAWS}
    if unknown:
        raise AdapterProblem("opt_out", f"unknown laws {', '.join(sorted(map(str, unknown)))}")
    try:
        _workload(0, adapter)
    except (TypeError, ValueError) as error:
        raise AdapterProblem("kernel_options", str(error)) from error
    return opt_out


def _workload(seed: int, adapter: Any) -> Workload:  # noqa: ANN401
    """A random workload with only what an adapter can do."""
    workload = random_workload(seed, adapter.policy)
    plain = {
        "hash_bits": 64,
        "long_prefill_token_threshold": 0,
        "watermark_blocks": 0,
        "reserve_full_prompt": True,
    }
    config = replace(workload.config, **{**plain, **dict(adapter.kernel_options)})
    can_abort = hasattr(adapter, "abort")
    operations: list[list[Any]] = []
    for operation in workload.operations:
        if operation[0] == "add":
            spec = {k: v for k, v in operation[1].items() if k not in ("keys", "min_tokens")}
            operations.append(["add", spec])
        elif operation[0] == "drain" or (operation[0] == "abort" and can_abort):
            operations.append(operation)
        elif operation[0] not in ("abort", "open"):
            operations.append(["step"])
    return Workload(config, workload.vocabulary, tuple(operations))


def describe(report: Report) -> str:
    """The report as text."""
    lines = [f"{report.workloads} workloads, {report.steps} steps"]
    lines.append(f"judged: {' '.join(report.judged)}")
    if report.opted_out:
        lines.append(f"opted out by the adapter: {' '.join(report.opted_out)}")
    if report.problem is not None:
        lines.append(f"ADAPTER PROBLEM in {report.problem}")
    if report.broken is not None:
        lines.append(f"BREAKS {law_name(report.broken.law)}: {report.broken.detail}")
    if report.workload is not None:
        lines.append(f"seed {report.seed}, {report.workload.config}")
        lines += [f"  {operation}" for operation in report.workload.operations]
    if report.passed:
        lines.append("all judged laws are kept")
    elif report.problem is None and report.broken is None:
        lines.append("NOTHING WAS JUDGED: no step was scheduled")
    return "\n".join(lines)
