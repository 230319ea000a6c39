"""`lockstep generate`: text from a model folder, on a CPU or a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from engine.arguments.parser import VerbParser, check_applies
from engine.arguments.table import DRAWS, SAMPLING
from engine.commands.options import add_engine_options, engine_options
from engine.core.errors import InputError
from engine.sampling_params import SamplingParams


def main(argv: Sequence[str]) -> int:
    """Runs the verb."""
    parser = VerbParser("generate", __doc__)
    for name in ("prompt", "chat", "stream"):
        parser.option(name)
    parser.option("json", detail="one object per prompt")
    _add_sampling_options(parser)
    add_engine_options(parser)
    args = parser.parse(argv)
    params = _sampling_params(args)
    options = engine_options(args)
    prompts = args.prompt or [line.rstrip("\n") for line in sys.stdin]
    if not prompts:
        raise InputError("no prompt: give --prompt or lines on standard input")
    if args.stream and (len(prompts) > 1 or args.json):
        raise InputError("--stream needs exactly one prompt and no --json")
    from engine.llm import LLM

    inputs = [[{"role": "user", "content": text}] for text in prompts] if args.chat else prompts
    with LLM(**options) as llm:  # type: ignore[arg-type]
        if args.stream:
            return _print_stream(llm, inputs[0], params)
        outputs = llm.generate(inputs, params, use_tqdm=sys.stderr.isatty())
    for text, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        if args.json:
            record = {
                "prompt": text,
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "ttft_ms": output.metrics.ttft_ms,
                "e2e_ms": output.metrics.e2e_ms,
            }
            print(json.dumps(record))
        else:
            print(completion.text if args.chat else text + completion.text)
    return 0


def _print_stream(llm, prompt, params: SamplingParams) -> int:  # type: ignore[no-untyped-def]  # noqa: ANN001
    shown = ""
    for output in llm.stream(prompt, params):
        text = output.outputs[0].text
        print(text[len(shown) :], end="", flush=True)
        shown = text
    print()
    return 0


def _add_sampling_options(parser: VerbParser) -> None:
    group = parser.add_argument_group("sampling")
    defaults = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 64}
    for option in SAMPLING:
        parser.option(option.name, defaults.get(option.name), group=group)


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    how = DRAWS if args.temperature > 0 else "temperature 0, which takes the most likely token"
    check_applies(args, [option.name for option in SAMPLING], [how])
    return SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        max_tokens=args.max_tokens,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
        seed=args.request_seed,
    )
