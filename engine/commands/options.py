"""Engine options as command-line flags, derived from the options themselves."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, fields

from engine.options import ATTENTION_BACKENDS, DEVICES, DTYPES, LOAD_FORMATS, EngineOptions

_CHOICES = {
    "device": DEVICES,
    "dtype": DTYPES,
    "load_format": LOAD_FORMATS,
    "attention_backend": ATTENTION_BACKENDS,
    "policy": ("mixed", "prefill_first"),
}
_TYPES = {"int": int, "int | None": int, "float": float, "str": str, "str | None": str}


def add_engine_options(parser: argparse.ArgumentParser, **defaults: object) -> None:
    """Adds `--model` and a flag per engine option; `defaults` replace the options' own."""
    group = parser.add_argument_group("engine options")
    group.add_argument("--model", required="model" not in defaults, help="model folder")
    for field in fields(EngineOptions):
        if field.name == "model":
            continue
        assert field.default is not MISSING
        default = defaults.get(field.name, field.default)
        flag = "--" + field.name.replace("_", "-")
        kind = str(field.type)
        if kind == "bool":
            group.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=default, help="%(default)s"
            )
        else:
            group.add_argument(
                flag,
                type=_TYPES[kind],
                choices=_CHOICES.get(field.name),
                default=default,
                help=f"default {default}",
            )


def engine_options(args: argparse.Namespace) -> dict[str, object]:
    """Keyword arguments for `LLM`, the model's folder included."""
    return {field.name: getattr(args, field.name) for field in fields(EngineOptions)}
