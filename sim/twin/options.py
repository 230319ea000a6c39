"""The options of the twin beside those of a deployment and of the server."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.errors import ConfigError
from sim.twin.answers import AnswerOptions
from sim.twin.faults import Faults


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinOptions:
    """How a twin behaves where the simulated engine does not decide it.

    `speed` is simulated time over wall time; for `startup_duration_s` of wall time it is not ready.
    """

    speed: float = 1.0
    startup_duration_s: float = 0.0
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    faults: Faults = field(default_factory=Faults)
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1e-3 <= self.speed <= 1e6:
            raise ConfigError("speed", self.speed, "must be from 0.001 to 1000000")
        if not 0 <= self.startup_duration_s <= 86_400:
            raise ConfigError("startup_duration_s", self.startup_duration_s, "must be 0 to 86400")
