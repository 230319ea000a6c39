"""`lockstep bench serve`: a workload's requests at their times, over HTTP, to any OpenAI server."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence

from engine.arguments.parser import VerbParser
from engine.core.errors import ConfigError
from engine.steplog.atomic import check_replaceable, write_text
from sim.client.result import METRICS, PERCENTILES, bench_result
from sim.client.target import Target
from sim.commands.counters import Counter
from sim.commands.options import add_workload_options, load_workload, reading_notes
from sim.metrics.summary import parse_goodput
from sim.report.tables import text_table
from sim.run.option_table import CLIENT, SIM_TABLE
from sim.workloads.table import Workload

_DEFAULTS: dict[str, object] = {
    "base_url": "http://127.0.0.1:8000",
    "endpoint": "completions",
    "vocab_size": 32_000,
    "temperature": 0.0,
    "read_timeout_s": 600.0,
    "ignore_eos": True,
}


def main(argv: Sequence[str]) -> int:
    """Sends everything and prints the latencies; 1 where a request failed.

    Raises:
        ConfigError, InputError: the command line or the trace is wrong, or there is no server.
    """
    arguments = parser_of_bench_serve().parse(argv)
    slos_ms = parse_goodput(arguments.goodput)
    if arguments.result is not None:
        check_replaceable(arguments.result)
    workload = load_workload(arguments)
    for line in reading_notes(workload):
        print(f"note: {workload.name}: {line}", file=sys.stderr)
    result = asyncio.run(_send(arguments, workload, slos_ms))
    text = json.dumps(result, allow_nan=False)
    if arguments.result is not None:
        write_text(arguments.result, text + "\n")
    print(text if arguments.json else _table(result))
    return 1 if result["failed"] else 0


def parser_of_bench_serve() -> VerbParser:
    """The parser with all its options."""
    parser = VerbParser(
        "bench serve",
        __doc__,
        SIM_TABLE,
        "%(prog)s (--trace FILE | --workload NAME) [--base-url URL] [options]",
    )
    add_workload_options(parser)
    group = parser.add_argument_group("client")
    parser.option("model", None, group=group, detail="else the first that the server names")
    for option in CLIENT:
        parser.option(option.name, _DEFAULTS.get(option.name), group=group)
    for name in ("max_concurrency", "temperature", "ignore_eos", "goodput"):
        parser.option(name, _DEFAULTS.get(name), group=group)
    parser.option("seed", 0, group=group)
    parser.option("json", group=group)
    return parser


async def _send(
    arguments: argparse.Namespace, workload: Workload, slos_ms: dict[str, float]
) -> dict[str, object]:
    if not arguments.base_url.startswith(("http://", "https://")):
        reason = "must begin with http:// or https://"
        raise ConfigError("base_url", arguments.base_url, reason)
    extra_body = _object(arguments.extra_body)
    # Here, since the help of a verb needs no optional package.
    from sim.client.load import Load, model_of

    api_key = arguments.client_api_key
    target = Target(
        base_url=arguments.base_url,
        model=arguments.model or await model_of(arguments.base_url, api_key),
        vocab_size=arguments.vocab_size,
        api_key=api_key,
        chat=arguments.endpoint == "chat",
        ignore_eos=arguments.ignore_eos,
        temperature=arguments.temperature,
        max_concurrency=arguments.max_concurrency,
        read_timeout_s=arguments.read_timeout_s,
        extra_body=extra_body,
    )
    counter = Counter(len(workload), "requests", True)
    load = Load(workload, target, arguments.seed, counter if counter.shown else None)
    try:
        seen = await load.run()
    finally:
        counter.end()
    return bench_result(seen, target, load.begin_ns, workload.prompt_tokens, slos_ms)


def _object(text: str | None) -> dict[str, object]:
    """The fields of `--extra-body`.

    Raises:
        ConfigError: it is no JSON object.
    """
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError("extra_body", text, "must be a JSON object")
    return found


def _table(result: dict[str, object]) -> str:
    """What `sim run` shows of a run, here measured."""
    columns = ["mean", "median", *(f"p{percent}" for percent in PERCENTILES[1:])]
    rows = [
        [name.upper(), *(f"{result[f'{column}_{name}_ms']:,.2f}" for column in columns)]
        for name in METRICS
    ]
    facts = [
        ["requests", f"{result['completed']:,} completed, {result['failed']:,} failed"],
        ["duration", f"{result['duration']:,.2f} s"],
        ["requests/s", f"{result['request_throughput']:,.2f}"],
        ["output tokens/s", f"{result['output_throughput']:,.1f}"],
        ["sent late", f"{result['client_late_ms_max']:,.1f} ms at most"],
    ]
    if result["request_goodput"] is not None:
        facts.insert(3, ["goodput", f"{result['request_goodput']:,.2f} requests/s"])
    errors = result["errors"]
    assert isinstance(errors, list)
    first = next((error for error in errors if error), None)
    lines = [text_table(["ms", *columns], rows, indent="  "), text_table([], facts, indent="  ")]
    return "\n".join([*lines, *([f"first error: {first}"] if first else [])])
