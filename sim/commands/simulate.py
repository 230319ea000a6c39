"""`sim.simulate`: what `lockstep sim run` does, as a Python call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.core.errors import ConfigError
from sim.commands.run import parser_of_run, run_of
from sim.metrics.run_summary import RunSummary
from sim.run.option_table import SIM_TABLE


def simulate(**options: object) -> RunSummary:
    """Simulates one workload and returns its figures.

    The options are those of `lockstep sim run`, with `_` for `-`: exactly one of `workload` and
    `trace`, then what differs from the defaults. Switches are True or False; `goodput` is a
    mapping or texts (`{"ttft": 500}` or `["ttft:500"]`, ms). With `out` the files are written too.

    Raises:
        ConfigError, InputError: an option or a file is wrong, as on the command line.
    """
    if "json" in options:
        raise ConfigError(
            "json", options["json"], "simulate returns its figures, to_json() is JSON"
        )
    words = [word for name, value in options.items() for word in _words(name, value)]
    return run_of(parser_of_run().parse(words)).summary


def _words(name: str, value: object) -> list[str]:
    """An option as the command line has it; None and False switches are left out."""
    flag = "--" + name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        is_pair = name in SIM_TABLE and not SIM_TABLE[name].switch
        return [flag] if value else [f"--no-{flag[2:]}"] if is_pair else []
    if isinstance(value, Mapping):
        return [flag, *(f"{key}:{limit}" for key, limit in value.items())]
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [flag, *map(str, value)]
    return [f"{flag}={value}"]
