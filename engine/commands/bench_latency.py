"""`lockstep bench latency`: time of one batch from its arrival to its last token."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence

from engine.arguments.parser import VerbParser
from engine.commands.options import (
    add_engine_options,
    add_model_options,
    check_bench,
    engine_options,
    one_length,
)
from engine.sampling_params import SamplingParams


def main(argv: Sequence[str]) -> int:
    """Runs the verb."""
    parser = VerbParser("bench latency", __doc__)
    parser.option("batch_size", 8)
    parser.option("input_len", 32)
    parser.option("output_len", "128")
    parser.option("warm_up_iterations", 3)
    parser.option("iterations", 10)
    add_model_options(parser)
    add_engine_options(parser, model=None, load_format="dummy", enable_prefix_caching=False)
    args = parser.parse(argv)
    args.output_len = one_length("output_len", args.output_len)
    from engine.commands.bench_common import shape_folder, write_record

    options = engine_options(args)
    check_bench(args)
    with shape_folder(args.model, args.like) as folder:
        record = run({**options, "model": folder}, args)
    write_record(record, args.out)
    return 0


def run(options: dict[str, object], args: argparse.Namespace) -> dict[str, object]:
    """Starts an engine, runs the iterations and returns the record."""
    from engine.commands.bench_common import StepStatistics, percentiles, provenance
    from engine.llm import LLM

    started = time.perf_counter()
    with LLM(**options) as llm:  # type: ignore[arg-type]
        start_up_s = time.perf_counter() - started
        rng = random.Random(0)
        vocab_size = llm.model_config.vocab_size
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=args.output_len)
        batch_ms, ttft_ms, tpot_ms = [], [], []
        statistics = StepStatistics()
        for number in range(args.warm_up_iterations + args.iterations):
            prompts = [
                [rng.randrange(vocab_size) for _ in range(args.input_len)]
                for _ in range(args.batch_size)
            ]
            measured = number >= args.warm_up_iterations
            llm.on_step = statistics.add if measured else None
            begin = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            if not measured:
                continue
            batch_ms.append((time.perf_counter() - begin) * 1e3)
            for output in outputs:
                ttft, e2e = output.metrics.ttft_ms, output.metrics.e2e_ms
                assert ttft is not None
                assert e2e is not None
                ttft_ms.append(ttft)
                if args.output_len > 1:
                    tpot_ms.append((e2e - ttft) / (args.output_len - 1))
        return {
            "benchmark": "latency",
            "batch_size": args.batch_size,
            "input_len": args.input_len,
            "output_len": args.output_len,
            "batch_ms": percentiles(batch_ms),
            "ttft_ms": percentiles(ttft_ms),
            "tpot_ms": percentiles(tpot_ms) if tpot_ms else None,
            "start_up_s": start_up_s,
            "steps": statistics.summary(),
            **provenance(llm),
        }
