"""`lockstep golden check`: asks whether this machine computes the numbers of a checkpoint."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence

from engine.arguments.files import check_writable
from engine.arguments.parser import VerbParser
from engine.core.errors import InputError
from golden.check.model_options import add_model_options, engine_choices, finish, plan_of, say


def check_main(argv: Sequence[str]) -> int:
    """`lockstep golden check`: 0 if all rules are kept, 1 if one is broken, 2 if it cannot tell."""
    parser = VerbParser("golden check", __doc__)
    add_model_options(parser)
    parser.option("reference", detail="in place of HF on this machine")
    parser.option("json", detail="the record to standard output")
    parser.option("out", detail="the record as JSON")
    parser.option("html", detail="a page with plots")
    args = parser.parse(argv)
    check_writable("out", args.out)
    check_writable("html", args.html, ".html")
    command = shlex.join(["lockstep", "golden", "check", *argv])
    if args.reference is not None:
        if {"prompts", "max_tokens"} & args.given:
            raise InputError("--reference brings its own prompts: leave --prompts, --max-tokens")
        from golden.stored.record_verb import check_against

        return check_against(args, engine_choices(args), command)
    from golden.check.check_report import check_record, lines_of, to_page
    from golden.check.model_check import check_model

    started = time.perf_counter()
    outcome = check_model(plan_of(args), say)
    record = check_record(outcome, command, time.perf_counter() - started)
    return finish(args, record, lines_of(record), lambda: to_page(record))
