"""Faults on demand: replicas that fail or are slow, requests that go wrong."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.errors import ConfigError
from sim.cost.features import CostModel, EngineCostModel, StepFeatures
from sim.cost.pipeline import PipelineCostModel


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong, and when. Times are simulated seconds since the start.

    `fail_at` holds (second, replica); `slow` holds (replica, factor); of all requests a share of
    `error_rate` ends with an error after a few tokens.
    """

    fail_at: tuple[tuple[float, int], ...] = ()
    slow: tuple[tuple[int, float], ...] = ()
    error_rate: float = 0.0

    def check(self, num_replicas: int) -> None:
        """Raises ConfigError for replicas that do not exist and impossible figures."""
        for seconds, replica in self.fail_at:
            _check_replica("fail_at", replica, num_replicas)
            if not 0 <= seconds < 1e9:
                raise ConfigError("fail_at", seconds, "must be from 0 to 1e9 seconds")
        for replica, factor in self.slow:
            _check_replica("slow", replica, num_replicas)
            if not 0.01 <= factor <= 1000:
                raise ConfigError("slow", factor, "must be a factor from 0.01 to 1000")
        if not 0 <= self.error_rate <= 1:
            raise ConfigError("error_rate", self.error_rate, "must be from 0 to 1")

    def slowness(self, replica: int) -> float:
        """By what the step times of a replica are multiplied."""
        return dict(self.slow).get(replica, 1.0)


class SlowCost:
    """A cost model whose steps take longer by a factor."""

    def __init__(self, cost: CostModel, factor: float) -> None:
        self.name = cost.name
        self._cost, self._factor = cost, factor

    def step_time_ns(self, features: StepFeatures) -> int:
        """Duration of one step."""
        return max(1, round(self._cost.step_time_ns(features) * self._factor))

    def describe(self) -> dict[str, object]:
        """That of the cost model, and the factor."""
        return {**self._cost.describe(), "slower_by": self._factor}


class SlowEngineCost(SlowCost):
    """The same of a model that knows what lies between steps, and remembers them."""

    def __init__(self, cost: EngineCostModel, factor: float) -> None:
        super().__init__(cost, factor)
        self._engine = cost

    def intake_ns(self, num_prompt_tokens: int) -> int:
        """Time that the engine takes to take in a request."""
        return round(self._engine.intake_ns(num_prompt_tokens) * self._factor)

    def observe(self, features: StepFeatures, steps: int) -> None:
        """Steps have run."""
        self._engine.observe(features, steps)


class SlowPipelineCost(SlowCost):
    """The same of a device with its host beside it, which stays as fast as it is."""

    def __init__(self, cost: PipelineCostModel, factor: float) -> None:
        super().__init__(cost, factor)
        self.host = cost.host


def slowed(cost: CostModel, factor: float) -> CostModel:
    """The cost model of a replica whose steps take that much longer."""
    if factor == 1:
        return cost
    if isinstance(cost, PipelineCostModel):
        return SlowPipelineCost(cost, factor)
    if isinstance(cost, EngineCostModel):
        return SlowEngineCost(cost, factor)
    return SlowCost(cost, factor)


def parse_fail_at(texts: list[str]) -> tuple[tuple[float, int], ...]:
    """`SECONDS` or `REPLICA@SECONDS`, each replica from 0.

    Raises:
        ConfigError: it is neither.
    """
    found = []
    for text in texts:
        replica, _, seconds = text.rpartition("@")
        try:
            found.append((float(seconds), int(replica or 0)))
        except ValueError:
            reason = "must be SECONDS or REPLICA@SECONDS"
            raise ConfigError("fail_at", text, reason) from None
    return tuple(found)


def parse_slow(texts: list[str]) -> tuple[tuple[int, float], ...]:
    """`REPLICA:FACTOR`.

    Raises:
        ConfigError: it is not.
    """
    found = []
    for text in texts:
        replica, _, factor = text.partition(":")
        try:
            found.append((int(replica), float(factor)))
        except ValueError:
            raise ConfigError("slow", text, "must be REPLICA:FACTOR") from None
    return tuple(found)


def _check_replica(option: str, replica: int, num_replicas: int) -> None:
    if not 0 <= replica < num_replicas:
        limit = f"there are replicas 0 to {num_replicas - 1}"
        raise ConfigError(option, replica, limit)
