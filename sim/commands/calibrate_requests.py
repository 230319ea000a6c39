"""`lockstep sim calibrate-requests`: fits the roofline to the requests of a measured run."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from engine.arguments.files import check_writable
from engine.arguments.parser import VerbParser
from engine.core.errors import ConfigError, InputError
from engine.steplog.atomic import write_text
from sim.calibration.benchmark_results import is_aiperf, request_of_aiperf, requests_of_bench
from sim.calibration.request_runs import RequestFit, RequestTimes, fit_requests, replace_arrivals
from sim.commands.options import add_deployment_options, deployment_of
from sim.run.deployment import Deployment
from sim.run.option_table import SIM_TABLE
from sim.run.run import RunPlan, run_plan
from sim.workloads.readers import TraceOptions, read_trace
from sim.workloads.table import Workload

# Names of each column in the logs of common benchmark clients; times in seconds of one clock.
COLUMNS = {
    "prompt_tokens": ("prompt_tokens", "input_toks", "input_length"),
    "output_tokens": ("output_tokens", "output_toks", "output_length"),
    "queued": ("queued_ts", "arrival_s"),
    "first_token": ("first_token_ts", "first_token_s"),
    "last_token": ("last_token_ts", "last_token_s"),
}


def main(argv: Sequence[str]) -> int:
    """Fits and writes the parameters; returns the exit code 0.

    Raises:
        ConfigError, InputError: an option or a file is wrong; nothing was written.
    """
    arguments = _parser().parse(argv)
    out: Path = arguments.out
    check_writable("out", out, ".json")
    deployment = deployment_of(arguments)
    if deployment.cost != "auto":
        raise ConfigError("cost", deployment.cost, "is what this command makes; leave it out")
    deployment = replace(deployment, cost="roofline")
    workload, times = read_requests(arguments.requests, arguments.trace)
    visible = np.ones(len(workload), bool)
    if arguments.until is not None:
        visible = times.last_token_ns <= arguments.until * 1e9
    fit = fit_requests(workload, deployment, times, visible)
    _save(fit, deployment, arguments.requests, out)
    _print_result(fit, workload, deployment, times, visible)
    print(f"use it: --cost roofline:{out}")
    return 0


def _parser() -> VerbParser:
    parser = VerbParser(
        "sim calibrate-requests",
        "Fit the roofline's parameters to a run that was recorded per request only.",
        SIM_TABLE,
    )
    parser.add_argument(
        "requests",
        type=Path,
        metavar="REQUESTS.jsonl",
        help="one object per request: prompt_tokens, output_tokens, and in seconds of one clock"
        " queued_ts, first_token_ts, last_token_ts",
    )
    parser.option("trace", detail="the same requests in the same order, for their prefixes")
    parser.option("out", required=True, detail="the parameters, .json")
    parser.option("until")
    add_deployment_options(parser)
    return parser


def read_requests(path: Path, trace: Path | None = None) -> tuple[Workload, RequestTimes]:
    """Requests in the order in which they were queued, and their times.

    Raises:
        InputError: a file is unreadable or wrong; names file and line.
    """
    rows = _read_rows(path)
    columns = {name: np.array([row[name] for row in rows]) for name in COLUMNS}
    if trace is None:
        workload = _workload(path, columns)
    else:
        workload = read_trace(trace, TraceOptions())
        _check_lengths(path, trace, workload, columns)
    start = columns["queued"].min()
    queued, first, last = (
        np.round((columns[name] - start) * 1e9) for name in ("queued", "first_token", "last_token")
    )
    order = np.argsort(queued, kind="stable")
    times = RequestTimes(queued[order], first[order], last[order])
    return _reordered(workload, order.tolist()), times


def _read_rows(path: Path) -> list[dict[str, float]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    found = requests_of_bench(str(path), text)
    if found is None:
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        rows = [_read_row(f"{path}:{number}", line) for number, line in lines]
    else:
        rows = [_checked(f"{path}: request {place}", entry) for place, entry in enumerate(found)]
    kept = [row for row in rows if row is not None]
    if not kept:
        raise InputError(f"{path}: holds no request")
    return kept


def _read_row(where: str, line: str) -> dict[str, float] | None:
    """The request of a line; None for one that failed."""
    try:
        entry = json.loads(line)
    except ValueError:
        raise InputError(f"{where}: not a JSON object") from None
    if not isinstance(entry, dict):
        raise InputError(f"{where}: not a JSON object")
    if is_aiperf(entry):
        found = request_of_aiperf(where, entry)
        return None if found is None else _checked(where, found)
    return _checked(where, entry)


def _checked(where: str, entry: Mapping[str, object]) -> dict[str, float]:
    row = {name: _number(where, entry, name, keys) for name, keys in COLUMNS.items()}
    for name in ("prompt_tokens", "output_tokens"):
        if row[name] < 1 or row[name] != int(row[name]):
            raise InputError(f"{where}: {name}={row[name]:g}: must be a positive integer")
    if not row["queued"] < row["first_token"] <= row["last_token"]:
        raise InputError(
            f"{where}: queued {row['queued']}, first token {row['first_token']}, last token"
            f" {row['last_token']}: must follow each other on one clock"
        )
    return row


def _number(where: str, entry: Mapping[str, object], name: str, keys: Sequence[str]) -> float:
    for key in keys:
        value = entry.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value):
            return value
        if value is not None:
            raise InputError(f"{where}: {key}={value!r}: must be a number")
    raise InputError(f"{where}: {name}: is missing; its keys are {', '.join(keys)}")


def _workload(path: Path, columns: Mapping[str, np.ndarray]) -> Workload:
    count = len(columns["queued"])
    prompts, outputs = (
        array("q", columns[name].astype(np.int64).tolist())
        for name in ("prompt_tokens", "output_tokens")
    )
    return Workload(path.stem, array("q", [0]) * count, prompts, outputs)


def _check_lengths(
    path: Path, trace: Path, workload: Workload, columns: Mapping[str, np.ndarray]
) -> None:
    if len(workload) != len(columns["queued"]):
        raise InputError(f"{trace}: {len(workload)} requests, {path} has {len(columns['queued'])}")
    for name in ("prompt_tokens", "output_tokens"):
        differing = np.flatnonzero(np.array(getattr(workload, name)) != columns[name])
        if len(differing):
            raise InputError(f"{trace}: row {differing[0] + 1}: {name} differs from {path}")


def _reordered(workload: Workload, order: list[int]) -> Workload:
    """The same requests in another order; hash ids move along."""
    if order == list(range(len(order))):
        return workload
    prompts, outputs = (
        array("q", [column[row] for row in order])
        for column in (workload.prompt_tokens, workload.output_tokens)
    )
    hashed = workload.hashed
    if hashed is not None:
        ids, offsets = array(hashed.ids.typecode), array(hashed.offsets.typecode, [0])
        for row in order:
            ids.extend(hashed.ids[hashed.offsets[row] : hashed.offsets[row + 1]])
            offsets.append(len(ids))
        hashed = replace(hashed, ids=ids, offsets=offsets)
    return Workload(workload.name, workload.arrival_ns, prompts, outputs, hashed=hashed)


def _save(fit: RequestFit, deployment: Deployment, requests: Path, out: Path) -> None:
    """Writes the parameters; the file appears complete or not at all."""
    document = {
        "roofline": fit.options.given(),
        "fitted_on": {
            "requests": requests.name,
            "num_requests": fit.num_requests,
            "decode_error": fit.decode_error,
            "wait_error": fit.wait_error,
            "deployment": {
                key: value
                for key, value in asdict(deployment).items()
                if key in ("hardware", "tp", "replicas", "expert_parallel")
            }
            | {"model": Path(deployment.model).name},
        },
    }
    write_text(out, json.dumps(document, indent=1, allow_nan=False) + "\n")


def _print_result(
    fit: RequestFit,
    workload: Workload,
    deployment: Deployment,
    times: RequestTimes,
    visible: np.ndarray,
) -> None:
    for option, value in fit.options.given().items():
        print(f"  {option:<30} {value:>10.3f}" if value <= 1 else f"  {option:<30} {value:>10,}")
    fitted = replace(deployment, roofline=fit.options)
    ledger = run_plan(RunPlan(replace_arrivals(workload, times), fitted)).result.ledger
    columns = (ledger.arrival_ns, ledger.first_token_ns, ledger.finish_ns)
    simulated = RequestTimes(*(np.array(column, float) for column in columns))
    span, recorded_span = simulated.last_token_ns.max(), times.last_token_ns.max()
    print(f"error of the simulation with them, %: makespan {100 * (span / recorded_span - 1):+.1f}")
    parts = [("fitted", visible), ("others", ~visible)]
    for name, chosen in parts:
        if not chosen.any():
            continue
        cells = [
            f"{what} {100 * (_mean(simulated, what, chosen) / _mean(times, what, chosen) - 1):+.1f}"
            for what in ("wait_ns", "decode_ns")
        ]
        print(f"  {name} ({chosen.sum()}): mean {', '.join(cells)}".replace("_ns", ""))


def _mean(times: RequestTimes, what: str, chosen: np.ndarray) -> float:
    values: np.ndarray = getattr(times, what)
    return float(values[chosen].mean())
