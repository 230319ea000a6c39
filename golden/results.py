"""The result of one golden case, as pytest, the report and the record see it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

from engine.core.errors import ConfigError
from golden.compare import LogitStats

Measured = Mapping[str, float | int | str | bool]


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One row of the report.

    `status` is `pass`, `fail`, `skip` (with the reason in `detail`) or `error` (the case raised).
    `stats` is there where logits were compared, `measured` holds further named numbers.
    """

    group: str
    name: str
    status: str
    detail: str = ""
    stats: LogitStats | None = None
    measured: Measured = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """False if the run must fail."""
        return self.status in ("pass", "skip")

    def to_json(self) -> dict[str, object]:
        """Plain data for the record."""
        return asdict(self)


def from_stats(group: str, name: str, stats: LogitStats, **measured: float | str) -> CaseResult:
    """Passes if no rule is broken."""
    status = "pass" if stats.passed else "fail"
    return CaseResult(group, name, status, "; ".join(stats.violations), stats, measured)


def judged(group: str, name: str, broken: Iterable[str], **measured: float | str) -> CaseResult:
    """Passes if `broken` is empty."""
    problems = list(broken)
    return CaseResult(
        group, name, "fail" if problems else "pass", "; ".join(problems), measured=measured
    )


def skipped(group: str, name: str, reason: str) -> CaseResult:
    """A case that this machine cannot run."""
    return CaseResult(group, name, "skip", reason)


Case = Callable[[], Iterable[CaseResult]]


def run_case(group: str, name: str, case: Case) -> Iterator[CaseResult]:
    """Results of one case as they come; an exception becomes a result and stops only this case."""
    started = time.perf_counter()
    try:
        for result in case():
            now = time.perf_counter()
            yield _timed(result, now - started)
            started = now
    except ConfigError as error:
        # A backend that this machine lacks is no failure; any other refused option is.
        if error.option != "attention_backend":
            yield CaseResult(group, name, "error", f"ConfigError: {error}")
        else:
            yield skipped(group, name, str(error))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        trace = traceback.format_exc(limit=-4)
        seconds = time.perf_counter() - started
        yield CaseResult(group, name, "error", text, measured={"traceback": trace}, seconds=seconds)


def _timed(result: CaseResult, seconds: float) -> CaseResult:
    return CaseResult(
        result.group,
        result.name,
        result.status,
        result.detail,
        result.stats,
        result.measured,
        round(seconds, 3),
    )


def run_failed(results: Iterable[CaseResult]) -> str | None:
    """Why the run as a whole fails, or None: a broken case, or nothing that ran at all."""
    rows = list(results)
    bad = [row for row in rows if not row.ok]
    if bad:
        return f"{len(bad)} of {len(rows)} cases failed, first {bad[0].group}/{bad[0].name}"
    if not any(row.status == "pass" for row in rows):
        return f"nothing ran: all {len(rows)} cases were skipped"
    return None
