"""`lockstep serve`: OpenAI's endpoints over HTTP, on the engine or on the simulator."""

from __future__ import annotations

from collections.abc import Sequence

from engine.arguments.parser import VerbParser
from engine.commands.options import add_engine_options, engine_options
from engine.core.errors import InputError
from engine.options import EngineOptions
from engine.server.options import add_server_options, server_options
from engine.steplog.log_folder import log_file, log_folder


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
    server = server_options(args)
    kv_events = server.kv_events()
    from engine.async_llm.async_llm import AsyncLLM
    from engine.server.run import serve

    body = AsyncLLM(kv_events=kv_events, **options)  # type: ignore[arg-type]
    with log_folder(args.step_log):
        return serve(body, server)
