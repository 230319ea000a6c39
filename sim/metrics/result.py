"""The raw outcome of a run, from which figures and reports are made."""

from __future__ import annotations

from dataclasses import dataclass

from sim.metrics.requests import Ledger
from sim.metrics.server_stats import ServerStats
from sim.workloads.table import Workload


@dataclass(frozen=True, slots=True)
class RunResult:
    """Everything that metrics and reports are made of."""

    workload: Workload
    ledger: Ledger
    servers: tuple[ServerStats, ...]
    end_ns: int
