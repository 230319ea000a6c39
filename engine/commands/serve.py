"""`lockstep serve`: OpenAI's endpoints over HTTP, on the engine or on the simulator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.arguments.parser import VerbParser
from engine.commands.options import add_engine_options, engine_options
from engine.core.errors import ConfigError, InputError
from engine.options import EngineOptions
from engine.server.options import add_server_options, server_options

STEP_LOG_NAME = "steps.jsonl"


def main(argv: Sequence[str]) -> int:
    """Runs the verb over the engine; `--body sim` is another verb's (see `engine.cli`)."""
    parser = VerbParser("serve", __doc__)
    parser.add_argument("folder", nargs="?", metavar="MODEL", help="the model, as --model")
    parser.option("body", "engine")
    add_server_options(parser)
    add_engine_options(parser, model=None)
    args = parser.parse(argv)
    if (args.model is None) == (args.folder is None):
        raise InputError("give the model once: lockstep serve MODEL")
    args.model = args.folder if args.model is None else args.model
    options = engine_options(args)
    options["step_log"] = log_file(args.step_log)
    EngineOptions.from_kwargs(**options)  # type: ignore[arg-type]
    from engine.async_llm.async_llm import AsyncLLM
    from engine.server.run import serve

    body = AsyncLLM(**options)  # type: ignore[arg-type]
    with log_folder(args.step_log):
        return serve(body, server_options(args))


@contextlib.contextmanager
def log_folder(folder: str | None) -> Iterator[None]:
    """Makes the folder where it is missing, and takes it back where nothing came into it."""
    if folder is None or Path(folder).exists():
        yield
        return
    Path(folder).mkdir(parents=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            Path(folder).rmdir()


def log_file(folder: str | None) -> str | None:
    """The step log in its folder.

    Raises:
        ConfigError: there is a log already, or something else that is no folder.
    """
    if folder is None:
        return None
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ConfigError("step_log", folder, "is a file; a folder is needed")
    log = path / STEP_LOG_NAME
    if log.exists():
        raise ConfigError("step_log", folder, f"holds {STEP_LOG_NAME} already")
    return str(log)
