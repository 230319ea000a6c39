"""Cost models without physics: for queueing theory, tests and recorded durations."""

from __future__ import annotations

import bisect
import csv
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.core.errors import ConfigError, InputError
from sim.cost.features import StepFeatures


class ConstantCost:
    """Every step takes the same time."""

    name = "constant"
    physical = False  # makes no claim about any hardware, so no limit is checked

    def __init__(self, step_ns: int) -> None:
        if step_ns < 1:
            raise ConfigError("cost", f"constant:{step_ns}", "must take at least 1 ns")
        self._step_ns = step_ns

    def step_time_ns(self, features: StepFeatures) -> int:
        """Duration of one step."""
        return self._step_ns

    def decode_run_ns(
        self, num_rows: int, context_sum: int, steps: int, kv_shared_tokens: int = 0
    ) -> list[int]:
        """Durations of consecutive pure decode steps."""
        return [self._step_ns] * steps

    def describe(self) -> dict[str, object]:
        """Name and duration."""
        return {"name": self.name, "step_ns": self._step_ns}


class ExponentialCost:
    """Independent exponential step times, drawn in step order."""

    name = "exponential"
    physical = False

    def __init__(self, mean_ns: int, seed: int) -> None:
        if mean_ns < 1:
            raise ConfigError("cost", f"exponential:{mean_ns}", "must take at least 1 ns")
        self._mean_ns, self._seed = mean_ns, seed
        self._random = random.Random(seed)

    def step_time_ns(self, features: StepFeatures) -> int:
        """Duration of one step."""
        return max(1, round(self._random.expovariate(1.0) * self._mean_ns))

    def describe(self) -> dict[str, object]:
        """Name, mean and seed."""
        return {"name": self.name, "mean_ns": self._mean_ns, "seed": self._seed}


class ReplayCost:
    """Recorded durations, in order; a run that takes more steps than recorded is an error."""

    name = "replay"

    def __init__(self, durations_ns: Sequence[int], source: str = "") -> None:
        self._durations: Iterator[int] = iter(durations_ns)
        self._count, self._source = len(durations_ns), source

    def step_time_ns(self, features: StepFeatures) -> int:
        """Duration of the next recorded step."""
        duration = next(self._durations, None)
        if duration is None:
            raise InputError(
                f"{self._source or 'replay'}: the run needs more than the {self._count}"
                " recorded steps, so it is not the recorded run"
            )
        return duration

    def describe(self) -> dict[str, object]:
        """Name and number of recorded steps."""
        return {"name": self.name, "num_steps": self._count}


class TableCost:
    """Step time by tokens in the step, linear between the rows of a table.

    The table is a CSV with the columns `num_tokens` and `time_us`. Steps outside its range use
    the nearest two rows and are counted in `num_extrapolated`.
    """

    name = "table"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tokens, self._times_ns = _read_table(path)
        self.num_extrapolated = 0

    def step_time_ns(self, features: StepFeatures) -> int:
        """Duration of one step."""
        num_tokens = features.num_tokens
        if not self._tokens[0] <= num_tokens <= self._tokens[-1]:
            self.num_extrapolated += 1
        right = min(max(1, bisect.bisect_left(self._tokens, num_tokens)), len(self._tokens) - 1)
        low, high = self._tokens[right - 1], self._tokens[right]
        low_ns, high_ns = self._times_ns[right - 1], self._times_ns[right]
        return max(1, low_ns + (high_ns - low_ns) * (num_tokens - low) // (high - low))

    def describe(self) -> dict[str, object]:
        """Name and the rows of the table."""
        rows = [list(row) for row in zip(self._tokens, self._times_ns, strict=True)]
        return {"name": self.name, "num_tokens_time_ns": rows}


def _read_table(path: Path) -> tuple[list[int], list[int]]:
    tokens: list[int] = []
    times_ns: list[int] = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for line, row in enumerate(csv.DictReader(file), start=2):
                try:
                    num_tokens = int(row["num_tokens"])
                    time_ns = round(float(row["time_us"]) * 1000)
                except (KeyError, TypeError, ValueError, OverflowError):
                    raise InputError(
                        f"{path}:{line}: {dict(row)}: needs the numbers num_tokens and time_us"
                    ) from None
                if time_ns < 1 or num_tokens < 1 or (tokens and num_tokens <= tokens[-1]):
                    raise InputError(
                        f"{path}:{line}: {dict(row)}: must be positive, with num_tokens growing"
                    )
                tokens.append(num_tokens)
                times_ns.append(time_ns)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    if len(tokens) < 2:
        raise InputError(f"{path}: a table needs at least two rows")
    return tokens, times_ns
