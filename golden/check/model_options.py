"""Options that `golden check` and `golden record` share, and how the verbs end."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from engine.arguments.parser import VerbParser
from engine.core.errors import ConfigError
from engine.steplog.atomic import write_text

ENGINE_OPTIONS = (
    "dtype", "device", "attention_backend", "tensor_parallel_size", "quantization",
    "kv_cache_dtype", "block_size", "enforce_eager",
)  # fmt: skip


def add_model_options(parser: VerbParser) -> None:
    """Options that `check` and `record` share."""
    parser.option("model", required=True)
    parser.option("prompts", detail="JSON lines, or one prompt per line; else those that ship")
    parser.option("max_tokens", 24, detail="greedy tokens after each prompt")
    parser.option("dtype", "auto", detail="auto is the checkpoint's own")
    parser.option("device", "auto")
    parser.option("attention_backend", "auto")
    parser.option("tensor_parallel_size", 1)
    parser.option("quantization")
    parser.option("kv_cache_dtype", "auto")
    parser.option("block_size", 16)
    parser.option("enforce_eager", False)


def engine_choices(args: argparse.Namespace) -> dict[str, object]:
    """The engine's options of a command line."""
    return {name: getattr(args, name) for name in ENGINE_OPTIONS}


def plan_of(args: argparse.Namespace) -> Any:  # noqa: ANN401 (imports torch)
    """The plan of a command line."""
    from golden.check.check_plan import CheckPlan

    if args.prompts is not None and not args.prompts.is_file():
        raise ConfigError("prompts", str(args.prompts), "is no file")
    return CheckPlan(args.model, engine_choices(args), args.prompts, args.max_tokens)


def finish(
    args: argparse.Namespace, record: dict[str, Any], lines: list[str], page: Callable[[], str]
) -> int:
    """Writes what was asked for and gives the exit code."""
    from golden.record import finite, write_record

    if args.out is not None:
        write_record(record, args.out)
    if args.html is not None:
        write_text(args.html, page())
    print(json.dumps(finite(record), indent=1) if args.json else "\n".join(lines))
    return 1 if record["failure"] else 0


def say(line: str) -> None:
    """Progress, beside the result."""
    print(line, file=sys.stderr, flush=True)
