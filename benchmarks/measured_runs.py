"""Predicts public vLLM runs that were measured per request, without step times.

    python benchmarks/measured_runs.py SHARED/traces/measured [--out FILE]

Only what these runs recorded can be checked: latencies per request and throughput. Each run is
predicted by a roofline with default parameters, by one fitted to another run, and by one fitted to
the requests of its own first half, which is judged on the other requests.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from sim.calibration.request_runs import RequestTimes, fit_requests, replace_arrivals
from sim.cost.roofline import RooflineOptions
from sim.run.deployment import Deployment
from sim.run.run import RunPlan, run_plan
from sim.workloads.readers import TraceOptions, read_trace

COMMON = {"cost": "roofline", "max_num_batched_tokens": 2048, "async_scheduling": True}
# The RTX 4090's 2,588 blocks include vLLM's null block. The other pools are derived from the memory
# size; they are at least twice what their runs hold, so that they do not matter.
RUNS = {
    "rtx4090_llama-3.1-8b": Deployment(
        model="llama-3.1-8b", hardware="rtx4090", num_kv_blocks=2587, max_num_seqs=256,
        max_model_len=32768, **COMMON,
    ),
    "rtxpro6000_llama-3.1-8b": Deployment(
        model="llama-3.1-8b", hardware="rtxpro6000", max_num_seqs=128, max_model_len=131072,
        **COMMON,
    ),
    "rtxpro6000_qwen3-32b": Deployment(
        model="qwen3-32b", hardware="rtxpro6000", tp=2, max_num_seqs=128, max_model_len=40960,
        **COMMON,
    ),
    "rtxpro6000_qwen3-30b-a3b-instruct-2507": Deployment(
        model="qwen3-30b-a3b", hardware="rtxpro6000", replicas=2, expert_parallel=True,
        max_num_seqs=128, max_model_len=262144, **COMMON,
    ),
}  # fmt: skip
TRACES = {"llama-3.1-8b": "llama-3.1-8b", "qwen3-32b": "qwen3-32b", "qwen3-30b-a3b": "qwen3-32b"}
CARRIED_FROM = {
    "rtx4090_llama-3.1-8b": "rtxpro6000_llama-3.1-8b",
    "rtxpro6000_llama-3.1-8b": "rtx4090_llama-3.1-8b",
    "rtxpro6000_qwen3-32b": "rtxpro6000_llama-3.1-8b",
    "rtxpro6000_qwen3-30b-a3b-instruct-2507": "rtxpro6000_qwen3-32b",
}
# A fit to the first half of a run's time sees at least this share of the requests: of the mixture's
# run only 16 had finished by then, so there the first part is longer.
LEAST_SHARE = 1 / 3


class Recorded:
    """A run's requests and the workload that they belong to."""

    def __init__(self, folder: Path, name: str) -> None:
        text = (folder / f"vllm_{name}_requests.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        # These three are on one monotonic clock; arrival_time is on another and stays out.
        queued, first, last = (
            np.array([row[key] for row in rows])
            for key in ("queued_ts", "first_token_ts", "last_token_ts")
        )
        start = queued.min()
        self.times = RequestTimes(*((one - start) * 1e9 for one in (queued, first, last)))
        self.outputs = np.array([row["output_toks"] for row in rows])
        self.deployment = RUNS[name]
        trace = f"sharegpt300_{TRACES[self.deployment.model]}_blocks16.jsonl"
        self.workload = read_trace(folder / trace, TraceOptions())
        assert list(self.workload.output_tokens) == self.outputs.tolist()

    @property
    def early(self):
        """Requests that had finished when the first part ended."""
        last_ns = self.times.last_token_ns
        cut_ns = max(last_ns.max() / 2, np.quantile(last_ns, LEAST_SHARE))
        return last_ns <= cut_ns

    def fit(self, visible=None):
        """The fitted parameters and how near they come."""
        return fit_requests(self.workload, self.deployment, self.times, visible)

    def errors(self, options, chosen):
        """Errors in percent: throughput of the whole run, latencies of the chosen requests."""
        sent = replace_arrivals(self.workload, self.times)
        ledger = run_plan(RunPlan(sent, replace(self.deployment, roofline=options))).result.ledger
        columns = (ledger.arrival_ns, ledger.first_token_ns, ledger.finish_ns)
        found = self._figures(RequestTimes(*map(np.array, columns)), chosen)
        recorded = self.figures(chosen)
        return {key: round(100 * (found[key] / recorded[key] - 1), 2) for key in found}

    def figures(self, chosen):
        """The recorded figures."""
        return self._figures(self.times, chosen)

    def _figures(self, times, chosen):
        span_s = (times.last_token_ns.max() - times.queued_ns.min()) / 1e9
        found = {"output_throughput": float(self.outputs.sum()) / span_s}
        many = chosen & (self.outputs > 1)
        series = {
            "ttft": times.wait_ns[chosen],
            "tpot": times.decode_ns[many] / (self.outputs[many] - 1),
            "e2el": (times.last_token_ns - times.queued_ns)[chosen],
        }
        for name, values in series.items():
            found[f"mean_{name}_ms"] = float(values.mean()) / 1e6
            found[f"median_{name}_ms"] = float(np.median(values)) / 1e6
            found[f"p99_{name}_ms"] = float(np.percentile(values, 99)) / 1e6
        return found


def described(fit):
    """A fit as plain JSON."""
    options = {key: round(value, 4) for key, value in fit.options.given().items()}
    return {"fitted_requests": fit.num_requests, "parameters": options}


def judge(runs, fits, name):
    """All predictions of one run."""
    run = runs[name]
    everything = np.ones(len(run.outputs), bool)
    late = ~run.early
    half, source = run.fit(run.early), CARRIED_FROM[name]
    carried = fits[source]
    return {
        "recorded": {key: round(value, 2) for key, value in run.figures(everything).items()},
        "default": {"error_percent": run.errors(RooflineOptions(), everything)},
        "carried": {
            "fitted_on": source,
            **described(carried),
            "error_percent": run.errors(carried.options, everything),
        },
        "first_part": {
            **described(half),
            "first_part_s": round(float(run.times.last_token_ns[run.early].max()) / 1e9, 1),
            "error_percent_other_requests": run.errors(half.options, late),
            "error_percent_all_requests": run.errors(half.options, everything),
        },
        "own": {
            **described(fits[name]),
            "error_percent": run.errors(fits[name].options, everything),
        },
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    runs = {name: Recorded(arguments.folder, name) for name in RUNS}
    fits = {name: run.fit() for name, run in runs.items()}
    document = {"command": "python benchmarks/measured_runs.py SHARED/traces/measured", "runs": {}}
    for name in RUNS:
        document["runs"][name] = judge(runs, fits, name)
        print(name, json.dumps(document["runs"][name], indent=1), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
