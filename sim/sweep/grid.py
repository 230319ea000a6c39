"""What a sweep varies: options with their values, and the grid of points that they span."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from engine.arguments.option import Option
from engine.arguments.suggest import did_you_mean
from engine.core.errors import ConfigError

# More points than anybody looks at; a slip such as rate=1:10:1e9 must not fill the memory.
MOST_POINTS = 10_000
# Options that put more or less work on the same servers: only along them a curve has a knee.
LOADS = ("rate", "rate_scale", "clients", "max_concurrency")


@dataclass(frozen=True, slots=True)
class Axis:
    """One option, under the name that was written, with its values in their order."""

    name: str
    option: Option
    values: tuple[object, ...]

    @property
    def is_number(self) -> bool:
        """Whether its values have places on an axis."""
        return self.option.kind in (int, float)

    @property
    def is_load(self) -> bool:
        """Whether it puts more or less work on the same servers."""
        return self.option.name in LOADS


Setting = Mapping[str, object]


def parse_axis(text: str, options: Mapping[str, Option], fixed: Collection[str]) -> Axis:
    """The axis of `OPTION=ONE,TWO,...` or, for numbers, `OPTION=LOW:HIGH:COUNT`.

    `options` are those that can be varied, under all their names.

    Raises:
        ConfigError: no such option, a wrong value, or an option that is `fixed` already.
    """
    name, equals, values = text.partition("=")
    name = name.removeprefix("--").replace("-", "_")
    if not equals or not values:
        raise ConfigError("vary", text, "must be OPTION=ONE,TWO,... or OPTION=LOW:HIGH:COUNT")
    if name not in options:
        raise ConfigError("vary", text, f"no option to vary{did_you_mean(name, options)}")
    option = options[name]
    if option.name in fixed:
        raise ConfigError("vary", text, f"--{option.name.replace('_', '-')} is given too")
    found = _values(option, text, values)
    if len(set(found)) < len(found):
        raise ConfigError("vary", text, "names a value twice")
    return Axis(name, option, tuple(found))


def _values(option: Option, text: str, values: str) -> list[object]:
    if option.kind is bool:
        known = {"true": True, "false": False}
        if not set(values.split(",")) <= set(known):
            raise ConfigError("vary", text, "must be true, false or both")
        return [known[value] for value in values.split(",")]
    if option.kind in (int, float) and ":" in values:
        return _range(option, text, values.split(":"))
    return [option.parse(value) for value in values.split(",")]


def _range(option: Option, text: str, parts: Sequence[str]) -> list[object]:
    """Evenly spaced values, both ends among them."""
    if len(parts) != 3 or not parts[2].isdecimal():
        raise ConfigError("vary", text, "a range must be LOW:HIGH:COUNT")
    low, high = option.parse(parts[0]), option.parse(parts[1])
    assert isinstance(low, int | float) and isinstance(high, int | float)
    count = int(parts[2]) if len(parts[2]) < 10 else MOST_POINTS + 1
    if not 2 <= count <= MOST_POINTS or low >= high:
        limit = f"LOW < HIGH and a COUNT of at least 2 and at most {MOST_POINTS:,}"
        raise ConfigError("vary", text, f"a range must have {limit}")
    found = [low + (high - low) * index / (count - 1) for index in range(count)]
    if option.kind is int:
        return [round(value) for value in found]
    # Ten digits: 0.1 + 0.2 is meant to be 0.3.
    return [float(f"{value:.10g}") for value in found]


def check_axes(axes: Sequence[Axis], seeds: int) -> None:
    """Raises ConfigError where nothing is varied, an option twice, or too much."""
    if not axes:
        raise ConfigError("vary", None, "is needed, as in --vary rate=1,2,4,8")
    names = [axis.option.name for axis in axes]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError("vary", name, "is varied twice")
    runs = seeds
    for axis in axes:
        runs *= len(axis.values)
    if runs > MOST_POINTS:
        raise ConfigError("vary", " ".join(names), f"{runs:,} runs, at most {MOST_POINTS:,}")


def grid(axes: Sequence[Axis]) -> list[Setting]:
    """Every combination of values; the last axis changes fastest."""
    names = [axis.name for axis in axes]
    return [
        dict(zip(names, values, strict=True)) for values in product(*(axis.values for axis in axes))
    ]
