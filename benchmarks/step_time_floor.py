"""What limits the held-out error of step times: the scatter of the recorded host.

    python benchmarks/step_time_floor.py LOG... [--out FILE]      # needs scikit-learn too

For each log the mean absolute error (%) of a fit to the others; of a fit to the log itself; of a
fit to the others that is told the recorded times of all steps before; of one that is told the
recorded duration of each step's schedule() as a gauge of the host's speed at that moment; and of
one with shared KV reads at full price. And of boosted trees, which may bend as they like, on all
that a plan knows of a step and of the two before it, trained on four fifths of *all* steps, those
of the same run among them: what no model of the plan alone can be expected to beat by much.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

import sim.calibration.fit as fitting
from sim.calibration import matrices
from sim.calibration.build import graphs_of
from sim.calibration.regression import huber
from sim.calibration.samples import read_samples
from sim.cost import terms

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
    share = huber(work, log.host_ns, 0 * ones, ones, 0.2 * ones)
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
    weights = np.concatenate(fitting._weights(logs))
    tolerance = np.where(mixed, fitting.MIXED_HUBER, fitting.DECODE_HUBER)
    return huber(np.vstack(matrices), times, 0 * times, weights, tolerance)


def errors(log, predicted):
    relative = predicted / log.duration_ns - 1
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
        found[log.name] = errors(log, matrices[index] @ chosen)
    return found


def told_the_past(logs, graphs):
    """Errors one step ahead."""
    return {
        fold.name: {
            kind: [round(fold.ahead[kind].mape, 2), round(fold.ahead[kind].bias, 2)]
            for kind in ("decode", "mixed")
        }
        for fold in fitting.leave_one_out(logs, graphs)
    }


def known_of_plans(log, graphs):
    """All columns of work and terms, those of the two steps before, and the steps since prefill."""
    since, count = [], 0
    for mixed in log.is_mixed:
        since.append(count)
        count = 0 if mixed else count + 1
    added = np.concatenate([[0], log.num_added[:-1]])
    finished = np.concatenate([[0], log.num_finished[:-1]])
    now = np.column_stack([log.work, matrices.step_matrix(log, graphs), added, finished, since])
    return np.hstack([now, *(np.roll(log.work, lag, axis=0) for lag in (1, 2))])


def trees(logs, graphs):
    """Errors of boosted trees on the residual of the fit to all logs, in five random parts."""
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.model_selection import KFold

    fit_to_all = fitting.fit_steps(logs, graphs)
    known = np.vstack([known_of_plans(log, graphs) for log in logs])
    base = np.concatenate([matrices.step_matrix(log, graphs) @ fit_to_all.step_ns for log in logs])
    times = np.concatenate([log.duration_ns for log in logs])
    mixed = np.concatenate([log.is_mixed for log in logs])
    predicted = np.zeros(len(times))
    for kind in (mixed, ~mixed):
        rows = np.flatnonzero(kind)
        target = np.log(times[rows] / base[rows])
        for train, test in KFold(5, shuffle=True, random_state=0).split(rows):
            model = HistGradientBoostingRegressor(
                loss="absolute_error", max_iter=300, learning_rate=0.05, max_leaf_nodes=15,
                min_samples_leaf=30, random_state=0,
            )  # fmt: skip
            model.fit(known[rows[train]], target[train])
            predicted[rows[test]] = base[rows[test]] * np.exp(model.predict(known[rows[test]]))
    ends = np.cumsum([len(log) for log in logs])[:-1]
    return {
        log.name: errors(log, part)
        for log, part in zip(logs, np.split(predicted, ends), strict=True)
    }


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
    matrices = [matrices.step_matrix(log, graphs) for log in logs]
    itself = {
        log.name: errors(log, matrix @ fit([log], [matrix]))
        for log, matrix in zip(logs, matrices, strict=True)
    }
    told = [gauged(log, matrix) for log, matrix in zip(logs, matrices, strict=True)]
    found = {
        "fit to the others": study(logs, matrices),
        "fit to the log itself": itself,
        "told the times of all steps before": told_the_past(logs, graphs),
        "told the host's speed": study(logs, told),
        "boosted trees, other steps of the run among the trained": trees(logs, graphs),
    }
    terms.SHARED_READ_COST = 1.0
    found["shared reads at full price"] = study(
        logs, [matrices.step_matrix(log, graphs) for log in logs]
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
