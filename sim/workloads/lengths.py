"""Distributions of prompt and output lengths, parsed from short specs."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.core.errors import ConfigError
from sim.workloads.table import MAX_TOKENS

HELP = "N, uniform:LOW:HIGH, lognormal:MEDIAN:P99 or empirical:TRACE"
_Z99 = 2.3263478740408408


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution over whole numbers >= 1; `spec` identifies it."""

    spec: str
    draw: Callable[[np.random.Generator, int], array[int]]


def parse_lengths(
    option: str, spec: str, read_column: Callable[[Path], array[int]] | None = None
) -> Lengths:
    """The distribution of a spec (see `HELP`).

    Raises:
        ConfigError: the spec is malformed or its bounds are impossible.
    """
    kind, _, rest = spec.partition(":")
    if kind == "empirical" and rest and read_column is not None:
        values = np.asarray(read_column(Path(rest)), dtype=np.int64)
        return Lengths(spec, lambda rng, count: _column(rng.choice(values, count)))
    try:
        numbers = [int(part) for part in (rest.split(":") if rest else [kind])]
    except ValueError:
        raise ConfigError(option, spec, f"must be {HELP}") from None
    shape = (kind if rest else "fixed", len(numbers))
    if shape not in {("fixed", 1), ("uniform", 2), ("lognormal", 2)}:
        raise ConfigError(option, spec, f"must be {HELP}")
    if not all(1 <= number < MAX_TOKENS for number in numbers) or numbers != sorted(numbers):
        raise ConfigError(
            option, spec, f"needs numbers from 1 to {MAX_TOKENS - 1} that do not fall"
        )
    if shape[0] == "fixed":
        return Lengths(spec, lambda rng, count: array("q", [numbers[0]]) * count)
    low, high = numbers
    if shape[0] == "uniform":
        return Lengths(spec, lambda rng, count: _column(rng.integers(low, high + 1, count)))
    sigma = math.log(high / low) / _Z99
    return Lengths(
        spec, lambda rng, count: _column(np.rint(rng.lognormal(math.log(low), sigma, count)))
    )


def _column(values: np.ndarray) -> array[int]:
    clipped = np.clip(values, 1, MAX_TOKENS - 1).astype(np.int64)
    return array("q", clipped.tolist())
