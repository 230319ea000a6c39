"""`lockstep generate`: text from a model folder, on a CPU or a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from engine.commands.options import add_engine_options, engine_options
from engine.core.errors import InputError
from engine.sampling_params import SamplingParams


def main(argv: Sequence[str]) -> int:
    """Runs the verb."""
    parser = argparse.ArgumentParser(prog="lockstep generate", description=__doc__)
    parser.add_argument("--prompt", action="append", default=[], help="text; may be repeated")
    parser.add_argument("--chat", action="store_true", help="send each prompt as a chat message")
    parser.add_argument("--stream", action="store_true", help="print the text as it comes")
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt")
    _add_sampling_options(parser)
    add_engine_options(parser)
    args = parser.parse_args(argv)
    prompts = args.prompt or [line.rstrip("\n") for line in sys.stdin]
    if not prompts:
        raise InputError("no prompt: give --prompt or lines on standard input")
    if args.stream and (len(prompts) > 1 or args.json):
        raise InputError("--stream needs exactly one prompt and no --json")
    params = _sampling_params(args)
    from engine.llm import LLM

    inputs = [[{"role": "user", "content": text}] for text in prompts] if args.chat else prompts
    with LLM(**engine_options(args)) as llm:  # type: ignore[arg-type]
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


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, help="default 0 (greedy)")
    group.add_argument("--top-k", type=int, default=0)
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--min-p", type=float, default=0.0)
    group.add_argument("--max-tokens", type=int, default=64, help="default 64")
    group.add_argument("--stop", action="append", default=[], help="may be repeated")
    group.add_argument("--ignore-eos", action="store_true")
    group.add_argument("--request-seed", type=int, default=None, help="seed of each request")


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
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
