"""What limits the held-out error of step times: the scatter of the recorded host.

    python benchmarks/step_time_floor.py LOG... [--out FILE]

For each log the mean absolute error (%) of a fit to the others; of a fit to the log itself; of a
fit to the others that is told the recorded duration of each step's schedule() as a gauge of the
host's speed at that moment; and of a fit to the others with shared KV reads at full price.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

import sim.calibration.fit as fitting
from sim.calibration import terms
from sim.calibration.build import graphs_of
from sim.calibration.samples import read_samples

SMOOTHED_STEPS = 9


def gauge(log):
    """How slow the host was at each step: its schedule() against that of its work, and smoothed."""
    work = np.column_stack(
        [
            np.ones(len(log)),
            log.column("num_decodes") + log.column("num_chunks"),
            log.column("num_chunks"),
            log.column("chunk_tokens") / 1e3,
        ]
    )
    ones = np.ones(len(log))
    share = fitting._huber(work, log.host_ns, 0 * ones, ones, 0.2 * ones)
    slowness = np.clip(np.log(log.host_ns / (work @ share)), -1, 1)
    smooth = np.convolve(slowness, np.ones(SMOOTHED_STEPS) / SMOOTHED_STEPS, "same")
    return np.exp(slowness), np.exp(smooth)


def gauged(log, matrix):
    """The terms of a log, and the gauge for host-bound parts."""
    single, smooth = gauge(log)
    tokens = log.column("num_decodes") + log.column("chunk_tokens")
    sequences = log.column("num_decodes") + log.column("num_chunks")
    eager = (log.is_mixed & (tokens > 512)).astype(float)
    slack = eager * np.clip(1500 - tokens, 0, 1000) / 1e3
    extra = [single, smooth, sequences * smooth, single * eager, smooth * eager, slack * smooth]
    return np.column_stack([matrix, *extra])


def fit(logs, matrices):
    """The coefficients of the package's own fit on given matrices."""
    mixed = np.concatenate([log.is_mixed for log in logs])
    times = np.concatenate([log.duration_ns for log in logs])
    share = np.sqrt((~mixed).sum() / mixed.sum())
    weights = np.where(mixed, fitting.MIXED_WEIGHT * share, 1.0)
    tolerance = np.where(mixed, fitting.MIXED_HUBER, fitting.DECODE_HUBER)
    return fitting._huber(np.vstack(matrices), times, 0 * times, weights, tolerance)


def errors(log, matrix, coefficients):
    relative = matrix @ coefficients / log.duration_ns - 1
    mixed = log.is_mixed
    return {
        "decode": [round(100 * float(x), 2) for x in _both(relative[~mixed])],
        "mixed": [round(100 * float(x), 2) for x in _both(relative[mixed])],
    }


def _both(relative):
    return np.abs(relative).mean(), relative.mean()


def study(logs, matrices):
    """Errors of each log under a fit to the others."""
    found = {}
    for index, log in enumerate(logs):
        rest = [place for place in range(len(logs)) if place != index]
        chosen = fit([logs[place] for place in rest], [matrices[place] for place in rest])
        found[log.name] = errors(log, matrices[index], chosen)
    return found


def pooled(found, logs):
    """Mean absolute errors over all steps."""
    counts = {"decode": [(~log.is_mixed).sum() for log in logs],
              "mixed": [log.is_mixed.sum() for log in logs]}  # fmt: skip
    return {
        kind: round(
            float(np.average([found[log.name][kind][0] for log in logs], weights=weights)), 2
        )
        for kind, weights in counts.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    logs = [read_samples(path) for path in arguments.logs]
    graphs = graphs_of(logs, "auto")
    matrices = [terms.step_matrix(log, graphs) for log in logs]
    itself = {
        log.name: errors(log, matrix, fit([log], [matrix]))
        for log, matrix in zip(logs, matrices, strict=True)
    }
    told = [gauged(log, matrix) for log, matrix in zip(logs, matrices, strict=True)]
    found = {
        "fit to the others": study(logs, matrices),
        "fit to the log itself": itself,
        "told the host's speed": study(logs, told),
    }
    terms.SHARED_READ_COST = 1.0
    found["shared reads at full price"] = study(
        logs, [terms.step_matrix(log, graphs) for log in logs]
    )
    document = {
        "command": "python benchmarks/step_time_floor.py LOGS",
        "values": "mean absolute error and mean error in percent",
        "pooled": {name: pooled(one, logs) for name, one in found.items()},
        **found,
    }
    print(json.dumps(document, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
