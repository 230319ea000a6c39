"""How far a cost model's figures can be trusted: its class, what it was checked on, its error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Trust:
    """The measured error of a class of cost models.

    `low_percent` and `high_percent` bound predicted / measured - 1 of mean TTFT and TPOT over the
    runs that the class was checked on; None where nothing was measured. How each was measured is
    in docs/fidelity.md.
    """

    cost: str
    checked_on: str
    low_percent: float | None = None
    high_percent: float | None = None
    # Of mean TPOT alone, where the other bounds are mostly those of queues.
    tpot_percent: tuple[float, float] | None = None

    @property
    def step_percent(self) -> tuple[float, float] | None:
        """The bounds that hold for step times, as far as they are known."""
        if self.tpot_percent is not None:
            return self.tpot_percent
        if self.low_percent is None or self.high_percent is None:
            return None
        return self.low_percent, self.high_percent

    @property
    def text(self) -> str:
        """One line for people: `calibrated: -3 .. +2 % (held-out runs of vllm 0.33.0 on h200)`."""
        if self.low_percent is None or self.high_percent is None:
            return f"{self.cost}: {self.checked_on}"
        band = f"{self.low_percent:+.0f} .. {self.high_percent:+.0f} %"
        return f"{self.cost}: {band} ({self.checked_on})"

    def to_json(self) -> dict[str, object]:
        """For `summary.json`."""
        return {
            "checked_on": self.checked_on,
            "low_percent": self.low_percent,
            "high_percent": self.high_percent,
        }


# The default parameters against four runs on the H200 and four public ones: benchmarks/records,
# asynchronous_runs.json and measured_runs.json.
ROOFLINE_TRUST = Trust(
    "roofline",
    "vLLM 0.19, 0.33 on RTX 4090, RTX PRO 6000, H200; mostly too fast; TPOT alone -33 .. +8 %",
    -88,
    12,
    (-33, 8),
)
FITTED_ROOFLINE_TRUST = Trust("roofline fitted to requests", "later requests of its own run", -2, 4)
GIVEN_TRUST = "step times are given, not predicted"


def trust_of_profile(engine: str, hardware: str, errors: Sequence[Mapping[str, Any]]) -> Trust:
    """The range of free-running errors in percent, each a mapping with `ttft` and `tpot`."""
    where = f"{engine} on {hardware}"
    if not errors:
        return Trust("calibrated", f"{where}, not checked on a run that it was not fitted to")
    values = [float(error[name]) for error in errors for name in ("ttft", "tpot")]
    checked = f"held-out runs of {where}"
    return Trust("calibrated", checked, min(0.0, *values), max(0.0, *values))


@runtime_checkable
class TrustedCost(Protocol):
    """A cost model that knows its measured error."""

    @property
    def trust(self) -> Trust:
        """The error of its class."""
        ...


def trust_of(cost: object, name: str) -> Trust:
    """The trust of a cost model; of one that states none, its times are given."""
    return cost.trust if isinstance(cost, TrustedCost) else Trust(name, GIVEN_TRUST)
