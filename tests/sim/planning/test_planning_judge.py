"""Verdicts on runs: early stops never change one, and growing queues are recognised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sim.cluster.prefill_decode import KvLink
from sim.metrics.requests import Ledger
from sim.metrics.stability import is_stable
from sim.planning.judge import statistic
from sim.planning.sampling import load_source
from sim.planning.space import Candidate, Group
from sim.planning.study import Limit, ShareGoal, Slo, WorkloadSpec
from sim.planning.trial import Trial, Worker
from sim.run.deployment import Deployment

SOURCE = load_source(
    WorkloadSpec(generator="poisson", parameters={"prompt": "lognormal:64:512", "output": "16"})
)
CANDIDATE = Candidate(
    (),
    (Group(Deployment(model="qwen3-0.6b", cost="constant:5", max_num_seqs=8, num_kv_blocks=4000)),),
    "round-robin",
)
SLOS = (
    Slo((Limit("ttft", 90.0, 60.0),)),
    Slo((Limit("tpot", 90.0, 5.2), Limit("e2el", 99.0, 150.0))),
    Slo((), ShareGoal(0.95, {"ttft": 60.0, "e2el": 200.0})),
    Slo((Limit("ttft", None, 40.0), Limit("itl", 99.0, 6.0))),
)


def trial(rate, slo, **changes):
    return replace(Trial(CANDIDATE, rate, 0, 300, slo, KvLink(), 0.1, 0.1), **changes)


@pytest.mark.parametrize("slo", SLOS, ids=lambda slo: slo.describe())
def test_an_early_stop_is_a_miss_of_the_whole_run_too(slo):
    worker = Worker(SOURCE)
    verdicts = []
    for rate in (40.0, 75.0, 85.0, 95.0, 200.0):
        whole = worker.run(trial(rate, slo, early_stop=False))
        early = worker.run(trial(rate, slo))
        assert whole.error is None and not whole.stopped
        assert early.met == whole.met
        if not early.stopped and early.met:
            assert early.good_share == pytest.approx(whole.good_share)
            assert early.latencies_ms["p90 ttft"] == whole.latencies_ms["p90 ttft"]
        verdicts.append((whole.met, early.stopped))
    assert verdicts[0] == (True, False)
    assert not verdicts[-1][0]


def test_a_hopeless_run_is_stopped():
    assert Worker(SOURCE).run(trial(400.0, SLOS[0])).stopped


def test_overload_is_unstable_even_if_the_limit_is_loose():
    loose = Slo((Limit("e2el", 99.0, 1e6),))
    worker = Worker(SOURCE)
    assert worker.run(trial(40.0, loose)).met
    swamped = worker.run(trial(200.0, loose))
    assert not swamped.stable and not swamped.met
    assert swamped.binding == "unstable"


def test_stability_looks_at_growth_and_not_at_filling_up():
    for service_s, stable in ((5.0, True), (0.01, True)):
        ledger = Ledger(1000)
        for row in range(1000):
            ledger.arrival_ns[row] = row * 10**8
            ledger.finish_ns[row] = ledger.arrival_ns[row] + round(service_s * 1e9)
        assert is_stable(ledger) is stable
    growing = Ledger(1000)
    for row in range(1000):
        growing.arrival_ns[row] = row * 10**8
        growing.finish_ns[row] = round(row * 1.2e8) + 10**8
    assert not is_stable(growing)


def test_rejected_requests_miss_unless_they_are_left_out():
    small = replace(CANDIDATE.groups[0].deployment, max_model_len=200)
    candidate = Candidate((), (Group(small),), "round-robin")
    slo = Slo((Limit("ttft", 95.0, 1000.0),))
    missed = Worker(SOURCE).run(trial(20.0, slo, candidate=candidate, early_stop=False))
    assert missed.rejected > 15 and not missed.met
    assert missed.worst is None and missed.good_share < 0.95
    lenient = load_source(replace(SOURCE.spec, on_oversize="leave_out"))
    left_out = Worker(lenient).run(trial(20.0, slo, candidate=candidate))
    assert left_out.rejected > 15 and left_out.met


def test_percentiles_are_linear_and_infinite_values_count():
    values = np.array([1.0, 2.0, 3.0, 4.0])
    assert statistic(values, 50.0) == 2.5
    assert statistic(values, None) == 2.5
    assert statistic(np.array([1.0, np.inf]), 50.0) == np.inf
    assert statistic(np.array([1.0, 2.0, np.inf]), 50.0) == 2.0


def test_a_failure_inside_a_run_is_reported_and_not_raised():
    broken = replace(CANDIDATE.groups[0].deployment, cost=f"table:{Path('no.csv')}")
    result = Worker(SOURCE).run(trial(10.0, SLOS[0], candidate=Candidate((), (Group(broken),), "")))
    assert result.error is not None and "no.csv" in result.error
