"""The engine's options as flags of a verb, and back as keyword arguments of `LLM`."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, fields, replace

from engine.arguments.files import check_writable
from engine.arguments.parser import VerbParser, check_applies
from engine.arguments.suggest import one_of
from engine.arguments.table import TABLE, policy_situation
from engine.core.errors import ConfigError, InputError
from engine.models.presets import PRESETS
from engine.options import EngineOptions


def add_engine_options(parser: VerbParser, **defaults: object) -> None:
    """Adds `--model` and a flag per engine option; `defaults` replace the options' own."""
    group = parser.add_argument_group("engine options")
    for field in fields(EngineOptions):
        default = defaults.get(field.name, field.default)
        required = default is MISSING
        parser.option(field.name, None if required else default, required=required, group=group)


def engine_options(args: argparse.Namespace) -> dict[str, object]:
    """Keyword arguments for `LLM`, the model's folder included.

    Raises:
        ConfigError: an option was written that the chosen policy does not have.
    """
    names = [field.name for field in fields(EngineOptions)]
    check_applies(args, names, [policy_situation(args.policy)])
    return {name: getattr(args, name) for name in names}


def add_model_options(parser: VerbParser) -> None:
    """Adds what all benchmarks have: the shape to measure, and the record's file."""
    parser.option("out", detail="the record as JSON")
    parser.option("like", detail=f"one of {', '.join(sorted(PRESETS))}")


def check_bench(args: argparse.Namespace) -> None:
    """Refuses what would fail only after the measurement, or in the middle of it.

    Raises:
        ConfigError, InputError: an option cannot be meant.
    """
    if (args.model is None) == (args.like is None):
        raise InputError("give either --model or --like")
    if args.like is not None and args.like not in PRESETS:
        raise ConfigError("like", args.like, one_of(args.like, sorted(PRESETS)))
    check_writable("out", args.out)
    folder = "." if args.model is None else args.model
    EngineOptions.from_kwargs(**{**engine_options(args), "model": folder})  # type: ignore[arg-type]


def one_length(name: str, text: str) -> int:
    """The whole number that a specification of lengths is where no lengths are drawn."""
    option = replace(TABLE[name], kind=int, least=1)
    value = option.parse(text)
    assert isinstance(value, int)
    return value
