"""Studies whose capacity a formula knows: how often does the planner's interval cover it?

    python benchmarks/planner_truth.py --repeats 10 --out benchmarks/records/planner_truth.json

Steps take a constant 10 ms and prompts one token, so that a request is a service of as many steps
as it has output tokens, and a seat is a server of a queue. Each study is carried out with
`--repeats` values of `search.seed`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sim.planning.cache import ResultCache
from sim.planning.executors import make_executor
from sim.planning.interleave import Driver
from sim.planning.parse import read_study
from sim.planning.planner import Planner
from sim.planning.sampling import load_source

STEP_S = 0.01
MEAN_GEOMETRIC = 8
_ROWS = 20_000
_STUDY = """
workload: {{generator: {generator}, prompt: 1, output: "{output}"{more}}}
slo: {{ttft_ms: {{{statistic}: {limit}}}}}
objective: {{kind: max_rate}}
space: {{cost: "constant:10", max_num_seqs: {seats}, replicas: {replicas}, router: round-robin,
  hardware: h200, model: qwen3-0.6b, num_kv_blocks: 20000, prefix_caching: false}}
search: {{requests: {requests}, seeds: 4, tolerance: 0.02, verify_seeds: 0, seed: {seed}}}
"""
SESSIONS = ", think_s: 1.0, turns: 4, shared_prefix: 1"


@dataclass(frozen=True)
class Case:
    """A study and its truth: `ttft_s(rate)` is the exact statistic that the SLO limits."""

    name: str
    ttft_s: Callable[[float], float]
    highest: float  # rate at which the queue has no steady state
    limit_ms: int
    output: str = "geometric"
    statistic: str = "mean"
    seats: int = 1
    replicas: int = 1
    generator: str = "poisson"
    more: str = ""

    def truth(self) -> float:
        """The rate at which the limit is met exactly."""
        low, high = 0.0, self.highest * (1 - 1e-9)
        for _ in range(40):
            middle = (low + high) / 2
            if self.ttft_s(middle) * 1e3 <= self.limit_ms:
                low = middle
            else:
                high = middle
        return low


# Services, in steps ----------------------------------------------------------------------------


def geometric_column() -> np.ndarray:
    """Lengths whose distribution is geometric, as close as 20,000 rows allow."""
    levels = (np.arange(_ROWS) + 0.5) / _ROWS
    return np.ceil(np.log1p(-levels) / math.log1p(-1 / MEAN_GEOMETRIC)).astype(int)


def moments(lengths: np.ndarray) -> tuple[float, float]:
    """Mean and second moment of the service time, in seconds."""
    seconds = lengths * STEP_S
    return float(seconds.mean()), float((seconds**2).mean())


def lognormal_moments(median: float, p99: float) -> tuple[float, float]:
    """Those of rounded lognormal lengths, by their exact probabilities."""
    sigma = math.log(p99 / median) / statistics.NormalDist().inv_cdf(0.99)
    values = np.arange(1, 200_000)
    upper = [statistics.NormalDist(math.log(median), sigma).cdf(math.log(v + 0.5)) for v in values]
    weights = np.diff(np.concatenate([[0.0], upper]))
    weights[-1] += 1 - weights.sum()
    seconds = values * STEP_S
    return float((weights * seconds).sum()), float((weights * seconds**2).sum())


# Waiting times ---------------------------------------------------------------------------------


def pollaczek_khinchine(first: float, second: float) -> Callable[[float], float]:
    """Mean wait of M/G/1."""
    return lambda rate: rate * second / (2 * (1 - rate * first))


_CELLS = 8  # of a step


def wait_sums(rate: float, service: np.ndarray) -> np.ndarray:
    """P(wait <= t) of M/G/1 by eighths of a step, by the Pollaczek-Khinchine series.

    The wait is a geometric sum of residual services; bounds from rounding down and up meet as the
    lattice gets finer, and their middle is used.
    """
    cells = _CELLS
    longest = int(service.max()) * cells
    survival = 1 - np.searchsorted(np.sort(service), np.arange(longest) / cells, "right") / len(
        service
    )
    residual = survival / survival.sum()  # by cell; its place within the cell is uniform
    load = rate * float(service.mean()) * STEP_S
    size = 1 << 16
    spectrum = np.fft.rfft(residual, size)
    middle = np.exp(-1j * np.pi * np.arange(len(spectrum)) / size)  # half a cell a term
    total = (1 - load) / (1 - load * spectrum * middle)
    density = np.fft.irfft(total, size)
    return np.cumsum(density)


def wait_quantile(service: np.ndarray, share: float) -> Callable[[float], float]:
    """The wait of M/G/1 that a share of the requests does not exceed."""

    def quantile(rate: float) -> float:
        return int(np.searchsorted(wait_sums(rate, service), share)) * STEP_S / _CELLS

    return quantile


def erlang_c(servers: int, load: float) -> float:
    """Probability that an arrival waits in M/M/c with `load` erlangs."""
    below = sum(load**k / math.factorial(k) for k in range(servers))
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    return last / (below + last)


def geometric_servers(servers: int) -> Callable[[float], float]:
    """Mean wait until a seat is entered of M/Geo/c whose services begin at step ends.

    The chain at step ends is solved exactly: Poisson arrivals between them, each busy seat is left
    with probability 1 / mean. An arrival waits for the rest of its step and, if no seat is free,
    for those before it.
    """
    leave = 1 / MEAN_GEOMETRIC
    size = 400

    def mean_wait(rate: float) -> float:
        come = rate * STEP_S
        arrivals = np.exp(-come) * np.cumprod(np.concatenate([[1.0], come / np.arange(1, 40)]))
        # State: requests present when a step begins.
        matrix = np.zeros((size, size))
        for present in range(size):
            busy = min(present, servers)
            for left in range(busy + 1):
                chance = math.comb(busy, left) * leave**left * (1 - leave) ** (busy - left)
                begin = present - left
                end = min(size, begin + len(arrivals))
                matrix[present, begin:end] += chance * arrivals[: end - begin]
        matrix /= matrix.sum(axis=1, keepdims=True)
        system = np.vstack([matrix.T - np.eye(size), np.ones(size)])
        chances = np.linalg.lstsq(system, np.append(np.zeros(size), 1.0), rcond=None)[0]
        waiting = np.maximum(0, np.arange(size) - servers)
        # Little: those that wait when a step begins have waited a whole step by its end, and
        # those that come in a step wait for half of it; an idle server begins a step at once.
        idle = float(chances[0])
        return float((chances * waiting).sum()) / rate + STEP_S / 2 * (1 - idle)

    return mean_wait


def cyclic_deterministic(servers: int, steps: int) -> Callable[[float], float]:
    """Mean wait of M/D/c, which equal services in turn make of c queues (Crommelin's formula)."""
    service = steps * STEP_S

    def mean_wait(rate: float) -> float:
        load = rate * service
        total = 0.0
        for k in range(1, 4000):
            mean = k * load
            level = k * servers
            # P(N > level) - and its weighted sum, with N Poisson of the mean.
            log_point = level * math.log(mean) - mean - math.lgamma(level + 1)
            point = math.exp(log_point)
            tail, term, j = 0.0, point, level
            while term > 1e-18:
                j += 1
                term *= mean / j
                tail += term
            total += point + (1 - level / mean) * tail
            if point < 1e-16:
                break
        return service * total

    return mean_wait


def cases() -> list[Case]:
    """The eight studies."""
    geometric = geometric_column()
    first, second = moments(geometric)
    uniform = moments(np.arange(1, 17))
    long = lognormal_moments(6, 40)

    def of(wait: Callable[[float], float]) -> Callable[[float], float]:
        return lambda rate: wait(rate) + STEP_S  # the first token takes a step of its own

    mg1 = pollaczek_khinchine(first, second)
    return [
        Case("M/D/1, mean", of(pollaczek_khinchine(0.08, 0.0064)), 12.5, 100, output="8"),
        Case("M/U/1, mean", of(pollaczek_khinchine(*uniform)), 1 / uniform[0], 150, "uniform:1:16"),
        Case("M/G/1 lognormal, mean", of(pollaczek_khinchine(*long)), 1 / long[0], 250,
             "lognormal:6:40"),
        Case("M/Geo/1, p90", of(wait_quantile(geometric, 0.9)), 1 / first, 500, statistic="p90"),
        Case("M/Geo/4, mean, four seats", of(geometric_servers(4)), 4 / first, 80, seats=4),
        Case("M/D/3, mean, three replicas in turn", of(cyclic_deterministic(3, 8)), 37.5, 60,
             output="8", replicas=3),
        Case("sessions of 4 turns, one seat, mean", lambda r: mg1(4 * r) + STEP_S,
             0.25 / first, 200, generator="sessions", more=SESSIONS),
        Case("sessions of 4 turns, four seats, mean",
             lambda r: geometric_servers(4)(4 * r) + STEP_S, 1 / first, 80, seats=4,
             generator="sessions", more=SESSIONS),
    ]  # fmt: skip


# The studies -----------------------------------------------------------------------------------


def carry_out(case: Case, seed: int, folder: Path, requests: int) -> dict[str, object]:
    """One study with one seed: interval, runs, and whether the truth is inside."""
    trace = folder / "geometric.csv"
    if not trace.exists():
        rows = "\n".join(f"{i / 10},1,{length}" for i, length in enumerate(geometric_column()))
        trace.write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}\n", encoding="utf-8")
    output = f"empirical:{trace}" if case.output == "geometric" else case.output
    path = folder / "study.yaml"
    path.write_text(
        _STUDY.format(
            generator=case.generator, output=output, more=case.more, statistic=case.statistic,
            limit=case.limit_ms, seats=case.seats, replicas=case.replicas, requests=requests,
            seed=seed,
        ),
        encoding="utf-8",
    )  # fmt: skip
    study = read_study(path)
    source = load_source(study.workload)
    begin, runs = time.process_time(), 0

    def count(*_: object) -> None:
        nonlocal runs
        runs += 1

    with make_executor(source, 1, None) as executor, tempfile.TemporaryDirectory() as cache:
        driver = Driver(executor, ResultCache(Path(cache), source), count)
        plan = Planner(study, source, driver, lambda text: None).plan()
    best, truth = plan.best, case.truth()
    assert best is not None
    interval = best.interval(study)
    assert interval is not None
    return {
        "seed": seed,
        "low": round(interval.low, 4),
        "mean": round(interval.mean, 4),
        "high": round(interval.high, 4),
        "covered": interval.low <= truth <= interval.high,
        "useful": interval.is_useful(study.search.width),
        "steady": best.unsteady is None,
        "seeds": len(best.seeds),
        "requests": max(run.num_requests for run in best.runs_at_capacity()),
        "runs": runs,
        "cpu_s": round(time.process_time() - begin, 1),
    }


def main() -> None:
    """Prints a line per study, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--only", type=int, help="the number of one study")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    chosen = [case for i, case in enumerate(cases()) if arguments.only in (None, i)]
    record = []
    for case in chosen:
        with tempfile.TemporaryDirectory() as folder:
            repeats = [
                carry_out(case, seed, Path(folder), arguments.requests)
                for seed in range(arguments.repeats)
            ]
        covered = sum(bool(one["covered"]) for one in repeats)
        mean = statistics.fmean(float(str(one["mean"])) for one in repeats)
        half = statistics.fmean(
            (float(str(one["high"])) - float(str(one["low"]))) / 2 for one in repeats
        )
        truth = case.truth()
        print(
            f"{case.name:40s} truth {truth:8.4f}  planner {mean:8.4f} +- {half:.4f}"
            f"  covered {covered} of {len(repeats)}"
            f"  {statistics.fmean(float(str(one['cpu_s'])) for one in repeats):.0f} s",
            flush=True,
        )
        record.append({"study": case.name, "limit": f"{case.statistic} TTFT {case.limit_ms} ms",
                       "truth": truth, "covered": covered, "repeats": repeats})  # fmt: skip
    if arguments.out is not None:
        total = sum(len(one["repeats"]) for one in record)
        document = {
            "what": "planner_truth",
            "command": f"python benchmarks/planner_truth.py --repeats {arguments.repeats}"
            f" --requests {arguments.requests}",
            "confidence": 0.95,
            "covered": sum(one["covered"] for one in record),
            "intervals": total,
            "studies": record,
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
