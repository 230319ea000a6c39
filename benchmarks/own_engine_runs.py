"""This engine's online logs, each predicted by a fit to the others, from when requests were due.

    python benchmarks/own_engine_runs.py LOG.jsonl.gz=DUE.json.gz ... [--out RECORD.json]

The engine's log knows when a request was handed over, which is between two calls; DUE is the
recording of the same workload that says when each was due. Requests before the workload (warm-up)
are left out.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from engine.steplog.vllm_recording import open_log
from sim.calibration.build import graphs_of, target_of
from sim.calibration.pipeline_build import fit_profile
from sim.calibration.pipeline_evaluate import evaluate_pipeline, pipeline_fold_json
from sim.calibration.pipeline_fit import fit_pipeline
from sim.calibration.pipeline_free import percent_errors, predicted_figures, recorded_figures
from sim.calibration.pipeline_samples import PipelineSamples, pipeline_samples
from sim.specs.models import model_named


def main() -> None:
    """Prints errors in percent and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pairs", nargs="+")
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    logs = []
    for pair in arguments.pairs:
        log, due = (pipeline_samples(open_log(path)) for path in pair.split("="))
        logs.append(as_due(log, due))
    graphs = graphs_of(logs, "auto")
    target = target_of(model_named(arguments.model), arguments.hardware, "bfloat16", 1, "lockstep")
    record = {}
    for held in logs:
        others = [log for log in logs if log is not held]
        profile = fit_profile(others, [], target, graphs)
        fold = evaluate_pipeline(held, fit_pipeline(others, graphs), graphs)
        errors = percent_errors(predicted_figures(held, profile), recorded_figures(held))
        record[held.name] = {
            "steps": pipeline_fold_json(fold),
            "free_running_percent": {key: round(error, 2) for key, error in errors.items()},
        }
        print(held.name, json.dumps(record[held.name], indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def as_due(log: PipelineSamples, due: PipelineSamples) -> PipelineSamples:
    """The log with the arrivals of `due`; its first request is given its own arrival."""
    lengths = [(one.prompt_tokens, one.output_tokens) for one in log.requests]
    wanted = sorted(due.requests, key=lambda one: one.arrival)
    first = [(one.prompt_tokens, one.output_tokens) for one in wanted]
    skipped = next(
        (place for place in range(len(lengths)) if lengths[place : place + len(first)] == first),
        None,
    )
    if skipped is None:
        raise SystemExit(f"{log.name} and {due.name} are of different workloads")
    served = log.requests[skipped : skipped + len(first)]
    start = min(one.arrival - asked.arrival for one, asked in zip(served, wanted, strict=True))
    requests = [
        replace(one, arrival=asked.arrival + start)
        for one, asked in zip(served, wanted, strict=True)
    ]
    kept = {one.id for one in requests}
    sampled = tuple(
        tuple([request_id for request_id in ids if request_id in kept]) for ids in log.sampled
    )
    return replace(log, requests=tuple(requests), sampled=sampled)


if __name__ == "__main__":
    main()
