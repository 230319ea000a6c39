"""One option: its name, type, limits, help and other spellings, and how a value is checked."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.arguments.suggest import nearest, one_of
from engine.core.errors import ConfigError

_WHOLE = re.compile(r"[+-]?[0-9]+")
_SIZED = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmgt])|([0-9]+)([KMGT])")
_LONGEST_SHOWN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option under all its names.

    `name` is that of Python, YAML and messages; flags are made from it and from the aliases. A
    `bool` has a `--no-` form unless it is a `switch`, which can only be turned on. `least` is
    allowed, `above` is not. `sized` integers may end in k, m, g, t (powers of 1000) or in
    capitals (of 1024), as in vLLM. `belongs_to` names the situations in which the option means
    something; empty for every one.
    """

    name: str
    kind: type
    help: str
    aliases: tuple[str, ...] = ()
    short: tuple[str, ...] = ()
    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    may_be_none: bool = False
    switch: bool = False
    sized: bool = False
    repeated: bool = False
    several: bool = False
    metavar: str = ""
    belongs_to: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The name and its aliases."""
        return (self.name, *self.aliases)

    @property
    def flags(self) -> tuple[str, ...]:
        """Every spelling on a command line."""
        return (*(f"--{name.replace('_', '-')}" for name in self.names), *self.short)

    @property
    def limit(self) -> str:
        """The limits of a number in words; empty where there are none."""
        low = f"at least {_plain(self.least)}" if self.least is not None else ""
        low = f"above {_plain(self.above)}" if self.above is not None else low
        high = f"at most {_plain(self.most)}" if self.most is not None else ""
        return " and ".join(part for part in (low, high) if part)

    def check(self, value: object) -> None:
        """Raises ConfigError where `value` is not of the type or outside the limits."""
        if value is None and self.may_be_none:
            return
        if self.kind is bool:
            if not isinstance(value, bool):
                raise ConfigError(self.name, value, "must be True or False")
        elif self.kind in (int, float):
            self._check_number(value)
        elif self.choices and value not in self.choices:
            raise ConfigError(self.name, value, one_of(value, self.choices))
        elif not isinstance(value, str | Path):
            raise ConfigError(self.name, value, "must be text")

    def parse(self, text: str) -> object:
        """The checked value of a text from a command line."""
        value: object = text
        if self.kind is int:
            value = self._whole(text)
        elif self.kind is float:
            try:
                value = float(text)
            except ValueError:
                raise ConfigError(self.name, _shown(text), "must be a number") from None
        elif self.kind is Path:
            if not text or "\0" in text:
                raise ConfigError(self.name, text, "must be a path")
            value = Path(text)
        self.check(value)
        return value

    def words(self, value: object) -> list[str]:
        """The words of a command line that give the option a value."""
        flag = self.flags[0]
        if isinstance(value, bool):
            if value or not self.switch:
                return [flag if value else f"--no-{flag[2:]}"]
            return []
        return [flag, *map(str, value if isinstance(value, list) else [value])]

    def check_belongs(self, value: object, situations: Collection[str]) -> None:
        """Raises ConfigError where none of the situations is one that the option belongs to."""
        if self.belongs_to and not set(self.belongs_to) & set(situations):
            here = ", ".join(situations)
            raise ConfigError(
                self.name, value, f"belongs to {' or '.join(self.belongs_to)}; this is {here}"
            )

    def _check_number(self, value: object) -> None:
        if self.kind is int and (not isinstance(value, int) or isinstance(value, bool)):
            raise ConfigError(self.name, value, "must be a whole number")
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ConfigError(self.name, value, "must be a finite number")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(self.name, value, "must be a finite number")
        too_low = self.least is not None and value < self.least
        too_low |= self.above is not None and value <= self.above
        if too_low or (self.most is not None and value > self.most):
            raise ConfigError(self.name, value, f"must be {self.limit}")

    def _whole(self, text: str) -> int:
        sized = _SIZED.fullmatch(text) if self.sized else None
        if sized is not None:
            number, small, whole, capital = sized.groups()
            if capital:
                return int(whole) << 10 * ("KMGT".index(capital) + 1)
            return round(float(number) * 1e3 ** ("kmgt".index(small) + 1))
        if _WHOLE.fullmatch(text) is None or len(text) > _LONGEST_SHOWN:
            raise ConfigError(self.name, _shown(text), "must be a whole number")
        return int(text)


class Table(Mapping[str, Option]):
    """Options by every one of their names."""

    def __init__(self, options: Iterable[Option]) -> None:
        self._by_name: dict[str, Option] = {}
        for option in options:
            for name in option.names:
                assert name not in self._by_name, f"{name} stands twice in the table of options"
                self._by_name[name] = option

    def __getitem__(self, name: str) -> Option:
        return self._by_name[name]

    def __iter__(self):  # type: ignore[no-untyped-def]  # noqa: ANN204
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def options(self) -> list[Option]:
        """Each option once, in the order of the table."""
        return list({option.name: option for option in self._by_name.values()}.values())


def resolve_names(
    table: Mapping[str, Option], values: Mapping[str, object], known: Collection[str]
) -> dict[str, object]:
    """The values under the names that the owner uses for them, whatever alias they came under.

    `known` are the owner's names; each may be any name of its option.

    Raises:
        ConfigError: a name that the owner does not have, or two names of one option.
    """
    own = {alias: name for name in known for alias in (table[name].names if name in table else ())}
    own.update({name: name for name in known})
    found: dict[str, object] = {}
    for name, value in values.items():
        if name not in own:
            meant = nearest(name, own)
            hint = f"did you mean {meant!r}?" if meant else f"known: {', '.join(sorted(known))}"
            raise ConfigError(name, value, f"no such option; {hint}")
        if own[name] in found:
            raise ConfigError(name, value, f"is another name of {own[name]}, which is given too")
        found[own[name]] = value
    return found


def _plain(number: float | None) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def _shown(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."
