"""`lockstep serve MODEL --body sim`: the simulated engine behind the HTTP server, in real time."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from engine.arguments.parser import VerbParser
from engine.core.errors import InputError
from engine.server.options import add_server_options, server_options
from engine.steplog.api import LogHeader, StepLogWriter
from engine.steplog.log_folder import log_file, log_folder
from engine.text.tokenizer import Tokenizer, load_tokenizer
from sim.commands.options import add_deployment_options, deployment_of
from sim.run.deployment import Deployment, Parts, build, versions
from sim.run.option_table import SIM_TABLE, TWIN
from sim.twin.answers import AnswerOptions
from sim.twin.body import Twin
from sim.twin.faults import Faults, parse_fail_at, parse_slow
from sim.twin.options import TwinOptions

_DEFAULTS: dict[str, object] = {
    "speed": 1.0,
    "startup_duration_s": 0.0,
    "mode": "random",
    "output_tokens_mean": 256.0,
    "output_tokens_cv": 0.6,
    "error_rate": 0.0,
}


def serve_main(argv: Sequence[str]) -> int:
    """Serves until a signal; the exit code.

    Raises:
        ConfigError, InputError: the command line or a file is wrong; nothing was written.
    """
    arguments = parser_of_serve().parse(argv)
    if arguments.folder is not None:
        if "model" in arguments.given:
            raise InputError("give the model once: lockstep serve MODEL --body sim")
        arguments.model, arguments.given = arguments.folder, {*arguments.given, "model"}
    deployment = deployment_of(arguments)
    options = twin_options(arguments)
    options.faults.check(deployment.replicas)
    server = server_options(arguments)
    kv_events = server.kv_events()
    parts = build(deployment, options.seed)
    tokenizer = tokenizer_of(deployment.model, arguments.tokenizer)
    from engine.server.run import serve

    with step_log(arguments.step_log, deployment, parts, options.seed) as log:
        twin = Twin(deployment, options, tokenizer, log, parts, kv_events)
        print(f"simulating {twin.describe()}", file=sys.stderr, flush=True)
        code = serve(twin, server)
        print(f"lockstep: the twin was {twin.lag_text}", file=sys.stderr, flush=True)
    return code


def parser_of_serve() -> VerbParser:
    """The parser with all its options."""
    parser = VerbParser("serve", __doc__, SIM_TABLE)
    parser.add_argument("folder", nargs="?", metavar="MODEL", help="the model, as --model")
    add_server_options(parser)
    add_deployment_options(parser)
    group = parser.add_argument_group("the twin")
    parser.option("tokenizer", group=group, detail="else the model folder's, or a simple one")
    parser.option("step_log", group=group)
    parser.option("seed", 0, group=group)
    for option in TWIN:
        parser.option(option.name, _DEFAULTS.get(option.name), group=group)
    parser.option("body", "engine")
    return parser


def twin_options(arguments: argparse.Namespace) -> TwinOptions:
    """The options of the twin.

    Raises:
        ConfigError: an impossible value.
    """
    return TwinOptions(
        speed=arguments.speed,
        startup_duration_s=arguments.startup_duration_s,
        answers=AnswerOptions(
            mode=arguments.mode,
            output_tokens_mean=arguments.output_tokens_mean,
            output_tokens_cv=arguments.output_tokens_cv,
            seed=arguments.seed,
        ),
        faults=Faults(
            parse_fail_at(arguments.fail_at), parse_slow(arguments.slow), arguments.error_rate
        ),
        seed=arguments.seed,
    )


def tokenizer_of(model: str, folder: str | None) -> Tokenizer | None:
    """The tokenizer that was asked for, or the one that lies beside the model's config.

    Raises:
        InputError: there is none where one was asked for.
    """
    if folder is None:
        return load_tokenizer(model) if Path(model).is_dir() else None
    found = load_tokenizer(folder) if Path(folder).is_dir() else None
    if found is None:
        raise InputError(f"tokenizer={folder}: a folder with a tokenizer is needed")
    return found


@contextlib.contextmanager
def step_log(
    folder: str | None, deployment: Deployment, parts: Parts, seed: int
) -> Iterator[StepLogWriter | None]:
    """The step log in its folder, complete when the server ends."""
    path = log_file(folder)
    if path is None:
        yield None
        return
    header = LogHeader(
        writer="sim",
        kernel=parts.kernel,
        options={"body": "sim"},
        model=asdict(parts.model),
        hardware={"tp": deployment.tp, **asdict(parts.hardware)},
        seed=seed,
        num_replicas=deployment.replicas,
        lockstep_version=versions()["lockstep-llm"],
    )
    with log_folder(folder), StepLogWriter(path, header) as log:
        yield log
