"""Predicts public vLLM runs that were measured per request, without step times.

    python benchmarks/measured_runs.py SHARED/traces/measured [--out FILE]

Only what these runs recorded can be checked: latencies per request, throughput, makespan. A
roofline with its default efficiencies is compared first; then one whose two efficiencies were
fitted to *another* of the runs. The fourth run is a mixture of experts, which is not modelled.
"""

from __future__ import annotations

import argparse
import itertools
import json
from array import array
from pathlib import Path

import numpy as np

from sim.cost.roofline import RooflineOptions
from sim.runs import RunPlan, simulate
from sim.setup import Deployment
from sim.workloads.readers import TraceOptions, read_trace

COMMON = {"router": "round-robin", "cost": "roofline", "max_num_batched_tokens": 2048}
RUNS = {
    "rtx4090_llama-3.1-8b": Deployment(
        model="llama-3.1-8b", hardware="rtx4090", num_kv_blocks=2588, max_num_seqs=256,
        max_model_len=16384, **COMMON,
    ),
    "rtxpro6000_llama-3.1-8b": Deployment(
        model="llama-3.1-8b", hardware="rtxpro6000", max_num_seqs=128, max_model_len=16384,
        **COMMON,
    ),
    "rtxpro6000_qwen3-32b": Deployment(
        model="qwen3-32b", hardware="rtxpro6000", tp=2, max_num_seqs=128, max_model_len=16384,
        **COMMON,
    ),
}  # fmt: skip
FITTED_ON = {
    "rtx4090_llama-3.1-8b": "rtxpro6000_llama-3.1-8b",
    "rtxpro6000_llama-3.1-8b": "rtx4090_llama-3.1-8b",
    "rtxpro6000_qwen3-32b": "rtxpro6000_llama-3.1-8b",
}
MEMORY, COMPUTE = (0.6, 0.7, 0.8, 0.9), (0.45, 0.6, 0.75)
KEYS = (
    "duration", "output_throughput", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms",
    "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms", "mean_e2el_ms", "median_e2el_ms",
    "p99_e2el_ms",
)  # fmt: skip


def measured(path):
    """The recorded figures, and when each request reached the engine in ns."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    queued = np.array([row["queued_ts"] for row in rows])
    first = np.array([row["first_token_ts"] for row in rows])
    last = np.array([row["last_token_ts"] for row in rows])
    outputs = np.array([row["output_toks"] for row in rows])
    many = outputs > 1
    found = {"duration": float(last.max() - queued.min())}
    found["output_throughput"] = float(outputs.sum()) / found["duration"]
    series = {
        "ttft": first - queued,
        "tpot": (last - first)[many] / (outputs[many] - 1),
        "e2el": last - queued,
    }
    for name, values in series.items():
        found[f"mean_{name}_ms"] = 1e3 * float(values.mean())
        found[f"median_{name}_ms"] = 1e3 * float(np.median(values))
        found[f"p99_{name}_ms"] = 1e3 * float(np.percentile(values, 99))
    return found, np.round((queued - queued.min()) * 1e9).astype(np.int64)


def predicted(folder, name, arrival_ns, options):
    """The simulator's figures for a run; tails are taken from the requests themselves."""
    deployment = RUNS[name]
    trace = folder / f"sharegpt300_{deployment.model}_blocks16.jsonl"
    workload = read_trace(trace, TraceOptions())
    order = np.argsort(arrival_ns, kind="stable")
    assert (order == np.arange(len(order))).all(), "requests reached the engine out of order"
    workload.arrival_ns = array("q", arrival_ns.tolist())
    fields = {name: getattr(deployment, name) for name in deployment.__slots__}
    plan = RunPlan(workload, Deployment(**{**fields, "roofline": options}))
    run = simulate(plan)
    ledger = run.result.ledger
    arrival, first, finish = (
        np.array(column) / 1e6
        for column in (ledger.arrival_ns, ledger.first_token_ns, ledger.finish_ns)
    )
    found = dict(run.summary)
    found["p99_ttft_ms"] = float(np.percentile(first - arrival, 99))
    found["p99_e2el_ms"] = float(np.percentile(finish - arrival, 99))
    return {key: float(found[key]) for key in KEYS}


def errors(figures, recorded):
    """Relative errors in percent."""
    return {key: round(100 * (figures[key] / recorded[key] - 1), 2) for key in KEYS}


def fit(folder, name, recorded, arrival_ns):
    """The two efficiencies that miss throughput and mean TPOT of a run the least."""
    best = None
    for memory, compute in itertools.product(MEMORY, COMPUTE):
        options = RooflineOptions(memory_efficiency=memory, compute_efficiency=compute)
        found = errors(predicted(folder, name, arrival_ns, options), recorded)
        miss = abs(found["output_throughput"]) + abs(found["mean_tpot_ms"])
        if best is None or miss < best[0]:
            best = (miss, options)
    return best[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = arguments.folder
    data = {name: measured(folder / f"vllm_{name}_requests.jsonl") for name in RUNS}
    fits = {name: fit(folder, name, *data[name]) for name in sorted(set(FITTED_ON.values()))}
    document = {"command": "python benchmarks/measured_runs.py SHARED/traces/measured", "runs": {}}
    for name, (recorded, arrival_ns) in data.items():
        default = errors(predicted(folder, name, arrival_ns, RooflineOptions()), recorded)
        options = fits[FITTED_ON[name]]
        fitted = errors(predicted(folder, name, arrival_ns, options), recorded)
        document["runs"][name] = {
            "recorded": {key: round(value, 2) for key, value in recorded.items()},
            "default_roofline_error_percent": default,
            "fitted_on": FITTED_ON[name],
            "memory_efficiency": options.memory_efficiency,
            "compute_efficiency": options.compute_efficiency,
            "fitted_roofline_error_percent": fitted,
        }
        print(name, "default", default, "\n  fitted on", FITTED_ON[name], fitted, flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
