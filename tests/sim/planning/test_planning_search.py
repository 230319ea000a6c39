"""The search for a capacity, fed with made-up verdicts; no simulation runs here."""

from __future__ import annotations

import math
import statistics
from array import array
from dataclasses import dataclass

import numpy as np
import pytest

from sim.planning.capacity import (
    SeedCapacity,
    check_around,
    interval_of,
    search_seed,
)
from sim.planning.sampling import Source, load_source
from sim.planning.study import WorkloadSpec
from sim.planning.trial import TrialResult
from sim.workloads.table import Workload


@dataclass(frozen=True)
class FakeTrial:
    """What a search reads and replaces of a trial."""

    rate: float | None
    seed: int
    early_stop: bool = True


def drive(search, met, saturated=100.0):
    """Answers a search with `met(rate)`; returns its result and the rates it asked for."""
    asked = []
    wanted = next(search)
    try:
        while True:
            results = []
            for trial in wanted:
                if trial.rate is None:
                    results.append(TrialResult(None, 0, 1, throughput=saturated))
                    continue
                asked.append(trial.rate)
                results.append(TrialResult(trial.rate, 0, 1, met=met(trial.rate), worst=1.0))
            wanted = search.send(results)
    except StopIteration as stop:
        return stop.value, asked


@pytest.mark.parametrize("capacity", [3.0, 20.0, 74.9, 75.1, 99.0, 400.0])
@pytest.mark.parametrize("tolerance", [0.1, 0.02])
def test_bisection_brackets_the_capacity_within_the_tolerance(capacity, tolerance):
    found, asked = drive(search_seed(FakeTrial, 0, tolerance), lambda rate: rate <= capacity)
    assert found.low <= capacity < found.high
    assert found.high / found.low <= 1 + tolerance
    assert abs(found.rate / capacity - 1) <= tolerance
    assert len(asked) <= 16


@pytest.mark.parametrize("saturated", [0.0123456789, 1.2345678, 99.999999, 12345.678])
def test_a_limit_that_nothing_meets_ends_with_one_whole_run(saturated):
    """The lowest rate is tried twice: the second time to the end, to say what was missing."""
    found, asked = drive(search_seed(FakeTrial, 0, 0.02), lambda rate: False, saturated)
    assert found.rate is None and found.low is None
    assert len(asked) < 12
    assert asked[-1] == asked[-2] == min(asked) <= 0.0201 * saturated


def test_a_start_near_the_capacity_saves_runs():
    _, from_scratch = drive(search_seed(FakeTrial, 0, 0.02), lambda rate: rate <= 40)
    _, near = drive(search_seed(FakeTrial, 1, 0.02, 40.5, 1.03), lambda rate: rate <= 40)
    assert len(near) < len(from_scratch)


def test_an_island_above_the_capacity_is_no_capacity():
    def met(rate):
        return rate <= 50 or 60 <= rate <= 70

    found, _ = drive(search_seed(FakeTrial, 0, 0.02), met)
    assert found.rate == pytest.approx(70, rel=0.02)  # the bracket saw the island only
    found, _ = drive(check_around(FakeTrial, found, 0.02), met)
    assert found.rate == pytest.approx(50, rel=0.02)
    assert found.islands and all(60 <= rate <= 70 for rate in found.islands)


def test_a_miss_below_lowers_the_stated_capacity():
    """The search can jump over a dip; the look around it must not."""
    found = SeedCapacity(0)
    for rate, verdict in ((70.0, True), (71.0, False)):
        found.tested[rate] = TrialResult(rate, 0, 1, met=verdict)
    found.settle()
    assert found.rate == pytest.approx(70.5, abs=0.1)
    checked, asked = drive(
        check_around(FakeTrial, found, 0.02), lambda rate: rate <= 60 or 66 <= rate <= 70
    )
    assert min(asked) < 60
    assert any(60 < rate < 66 for rate in asked)
    assert checked.low <= 60 < checked.high <= 66
    assert 70.0 in checked.islands


def test_the_interval_holds_seed_spread_and_resolution():
    rates = [10.0, 11.0, 12.0]
    interval = interval_of(rates, 0.95, 0.02)
    student = 4.302653 * statistics.stdev(rates) / math.sqrt(3)
    assert interval.mean == pytest.approx(11)
    assert interval.high - interval.mean == pytest.approx(student + 0.11)
    same = interval_of([10.0, 10.0], 0.95, 0.02)
    assert (same.low, same.high) == (pytest.approx(9.9), pytest.approx(10.1))


def trace_source(arrivals="trace", count=1000):
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(1e9, count)).astype(np.int64)
    base = Workload(
        "made.csv",
        array("q", (times - times[0]).tolist()),
        array("q", range(1, count + 1)),
        array("q", [5] * count),
    )
    return Source(WorkloadSpec(arrivals=arrivals, block_requests=50), base, "")


@pytest.mark.parametrize("arrivals", ["trace", "poisson", "gamma", "constant"])
def test_runs_of_one_seed_share_requests_and_relative_gaps(arrivals):
    source = trace_source(arrivals)
    slow, fast = source.draw(2.0, 400, 3), source.draw(8.0, 400, 3)
    assert slow.prompt_tokens == fast.prompt_tokens
    assert slow.arrival_ns[-1] == 200 * 10**9  # exactly the mean rate
    assert np.allclose(np.asarray(slow.arrival_ns) / 4, np.asarray(fast.arrival_ns), atol=2)
    assert source.draw(2.0, 400, 4).prompt_tokens != slow.prompt_tokens


def test_blocks_of_a_trace_keep_their_order():
    rows = trace_source().draw(1.0, 150, 1).prompt_tokens
    for begin in (0, 50, 100):
        block = rows[begin : begin + 50]
        assert list(block) == list(range(block[0], block[0] + 50))


def test_every_run_sees_all_parts_of_a_trace():
    """200 requests in stretches of 50 come from all four quarters of the trace."""
    for seed in range(20):
        rows = np.asarray(trace_source().draw(1.0, 200, seed).prompt_tokens)
        middles = np.sort(rows.reshape(4, 50).mean(axis=1))
        assert list((middles - 25) // (951 / 4)) == [0, 1, 2, 3]
    many = trace_source().draw(1.0, 5000, 0).prompt_tokens  # longer than the trace
    assert len(many) == 5000 and max(many) > 900 and min(many) < 100


def test_generators_meet_their_rate_exactly():
    source = load_source(WorkloadSpec(generator="gamma", parameters={"prompt": "64"}))
    drawn = source.draw(5.0, 300, 2)
    assert drawn.arrival_ns[-1] == 60 * 10**9
    assert drawn.output_tokens == source.draw(50.0, 300, 2).output_tokens
