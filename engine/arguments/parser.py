"""The one parser of all verbs: options come from the table, every error is one line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from engine.arguments.option import Option
from engine.arguments.suggest import did_you_mean
from engine.arguments.table import TABLE
from engine.core.errors import InputError

Group = argparse._ActionsContainer


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except those that only mean "not given"."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, [], argparse.SUPPRESS):
            return action.help
        return super()._get_help_string(action)


class VerbParser(argparse.ArgumentParser):
    """The parser of one verb; its errors are raised as InputError, which the command prints.

    Options are never abbreviated, and `_` may stand for `-` in their names, as in vLLM.
    """

    def __init__(
        self,
        verb: str,
        description: str | None,
        table: Mapping[str, Option] = TABLE,
        usage: str | None = None,
    ) -> None:
        super().__init__(
            prog=f"lockstep {verb}",
            description=description,
            usage=usage,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        self._table = table
        # By the attribute of the parsed arguments that it fills.
        self.options: dict[str, Option] = {}

    def option(
        self,
        name: str,
        default: object = None,
        *,
        detail: str = "",
        required: bool = False,
        group: Group | None = None,
    ) -> None:
        """Adds the table's option of that name; `detail` follows its help in this verb."""
        option = self._table[name]
        self.options[option.name] = option
        detail = f"; {detail}" if detail else ""
        arguments = {
            "dest": option.name,
            "required": required,
            "help": (option.help + detail).replace("%", "%%"),
        }
        target = group or self
        if option.switch:
            target.add_argument(*option.flags, action="store_true", **arguments)  # type: ignore[arg-type]
            return
        arguments["default"] = default
        if option.kind is bool:
            action = argparse.BooleanOptionalAction
            target.add_argument(*option.flags, action=action, **arguments)  # type: ignore[arg-type]
            return
        arguments["metavar"] = option.metavar or _metavar(option)
        if option.repeated or option.several:
            arguments["default"] = default or []
            key, value = ("action", "append") if option.repeated else ("nargs", "+")
            arguments[key] = value
        target.add_argument(*option.flags, **arguments)  # type: ignore[arg-type]

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The checked arguments, with two more: `given`, the names of the options that were
        written, and `options`, what the table says of each.

        Raises:
            InputError, ConfigError: the command line is wrong.
        """
        words, given = self._normal_words(argv)
        arguments = self.parse_args(words)
        for name in given & self.options.keys():
            value = getattr(arguments, name)
            option = self.options[name]
            if isinstance(value, str):
                setattr(arguments, name, option.parse(value))
            elif isinstance(value, list):
                setattr(arguments, name, [option.parse(text) for text in value])
        arguments.given, arguments.options = given, self.options
        return arguments

    def error(self, message: str) -> NoReturn:
        """Raises the usage error that argparse found."""
        raise InputError(f"{message} (see {self.prog} --help)")

    def _normal_words(self, argv: Sequence[str]) -> tuple[list[str], frozenset[str]]:
        """The words with `-` in the names of options, and the options that were written."""
        words: list[str] = []
        given = set()
        for place, word in enumerate(argv):
            if word == "--":
                words += argv[place:]
                break
            name, equals, value = word.partition("=")
            if word.startswith("--") and " " not in name:
                name = name.replace("_", "-")
                self._check_known(name, argv[place + 1 : place + 2])
                word = name + equals + value
            action = self._option_string_actions.get(name)
            if action is not None:
                given.add(action.dest)
            words.append(word)
        return words, frozenset(given)

    def _check_known(self, name: str, after: Sequence[str]) -> None:
        if name not in self._option_string_actions:
            known = [flag.removeprefix("--") for flag in self._option_string_actions]
            hint = did_you_mean(name.removeprefix("--"), known).replace("mean '", "mean '--")
            value = "".join(f" {word}" for word in after if not word.startswith("-"))
            raise InputError(f"unknown option {name}{value}{hint} (see {self.prog} --help)")


def check_applies(
    arguments: argparse.Namespace, names: Iterable[str], situations: Sequence[str]
) -> None:
    """Raises ConfigError for a written option that means nothing in any of the situations."""
    for name in names:
        if name in arguments.given:
            arguments.options[name].check_belongs(getattr(arguments, name), situations)


def _metavar(option: Option) -> str:
    if option.choices:
        return "|".join(option.choices)
    return {int: "N", float: "X"}.get(option.kind, option.name.upper())
