"""Runs that last long enough, and what is said when they cannot."""

from __future__ import annotations

import re
from array import array
from dataclasses import replace

import pytest

from sim.metrics.requests import COMPLETED, Ledger
from sim.planning.capacity import Interval, is_beaten
from sim.planning.judge import Judge
from sim.planning.parse import read_study
from sim.planning.plan_files import answer
from sim.planning.planner import Planner
from sim.planning.sampling import load_source
from sim.planning.space import all_choices, candidate_of
from sim.planning.study import Limit, Slo
from sim.planning.trial import Trial, Worker
from sim.workloads.table import Workload
from tests.sim.planning.test_planning_confirmation import MadeUp

# Eight seats and steps of 5 ms give 1,600 tokens a second: 25 sessions of 4 turns of 16 tokens.
SESSIONS = """
workload: {generator: sessions, prompt: 16, output: 16, think_s: 2, turns: 4, shared_prefix: 1}
slo: {ttft_ms: {p90: 200}}
objective: {kind: max_rate}
space: {cost: "constant:5", max_num_seqs: [8, 4], hardware: h200, model: qwen3-0.6b}
search: {requests: 200, seeds: 2, keep: 2, verify_seeds: 1, SEARCH}
"""
MS = 10**6


def study_of(tmp_path, search="multiple: 10"):
    path = tmp_path / "study.yaml"
    path.write_text(SESSIONS.replace("SEARCH", search), encoding="utf-8")
    return read_study(path)


def trial_of(study, rate, **changes):
    candidate = candidate_of(study, next(all_choices(study)))
    trial = Trial(candidate, rate, 0, 200, study.slo, study.link, 0.1, 0.1, multiple=10.0)
    return replace(trial, most_requests=6400, **changes)


def test_sessions_that_only_start_do_not_pass_for_a_load(tmp_path):
    """100 sessions a second are four times too many, but 50 of them end before it shows."""
    study = study_of(tmp_path)
    worker = Worker(load_source(study.workload))
    transient = worker.run(trial_of(study, 100.0, multiple=0.0))
    assert transient.met and transient.num_requests == 200
    assert not worker.run(trial_of(study, 100.0)).met


def test_a_run_lasts_for_a_multiple_of_its_slowest_process(tmp_path):
    study = study_of(tmp_path)
    result = Worker(load_source(study.workload)).run(trial_of(study, 10.0))
    assert result.met and result.steady and result.scale == "session"
    assert 6 < result.scale_s < 9  # three thoughts of 2 s and four answers
    # Doubling gives the fewest requests that last for ten sessions.
    assert result.num_requests / 4 / 10.0 >= 10 * result.scale_s
    assert result.num_requests / 2 / 4 / 10.0 < 10 * result.scale_s
    assert result.warmup_requests >= 0.1 * result.num_requests


def test_a_run_that_may_not_last_long_enough_says_so(tmp_path):
    study = study_of(tmp_path)
    trial = trial_of(study, 10.0, multiple=10.0)
    result = Worker(load_source(study.workload)).run(replace(trial, most_requests=400))
    assert result.met and not result.steady and result.num_requests == 400


def test_a_saturated_run_counts_sessions_and_waits_for_none_to_think(tmp_path):
    study = study_of(tmp_path)
    result = Worker(load_source(study.workload)).run(trial_of(study, None))
    assert 15 < result.throughput <= 26


class Short(MadeUp):
    """Runs whose sessions last for 30 s, of which they see two."""

    def _result(self, trial):
        result = super()._result(trial)
        return replace(result, steady=False, scale="session", scale_s=30.0, span_s=60.0)


def planned(study, driver):
    return Planner(study, load_source(study.workload), driver, lambda text: None).plan()


def test_without_a_steady_state_there_is_no_confirmed_capacity(tmp_path):
    study = study_of(tmp_path)
    plan = planned(study, Short(lambda seats, seed, is_long: 10.0 * seats))
    text = answer(plan)
    assert text.startswith("not confirmed: ") and "sustain" not in text
    # 200 requests last for 60 s, ten sessions for 300 s.
    assert "a session, takes 30 s, and 10 times that are about 1,000 requests" in text


def spread(percent):
    """A capacity that differs between seeds by as much, alike for all configurations."""
    return lambda seats, seed, is_long: 10.0 * seats * (1 + percent / 100 * (-1) ** seed)


def test_seeds_are_added_until_the_interval_is_useful(tmp_path):
    study = study_of(tmp_path, "width: 0.1, verify_factor: 2")
    calm = planned(study, MadeUp(spread(0.5)))
    assert len(calm.best.seeds) == 2
    wild = planned(study, MadeUp(spread(8)))
    assert 2 < len(wild.best.seeds) < 16
    interval = wild.best.interval(study)
    assert interval.is_useful(0.1)
    # The other has half of its capacity for every seed, which four seeds show.
    assert len(wild.entries[1].seeds) == 4 < len(wild.best.seeds)


def test_the_end_of_the_seeds_is_said_with_what_it_would_take(tmp_path):
    study = study_of(tmp_path, "width: 0.02, max_seeds: 6")
    plan = planned(study, MadeUp(spread(8)))
    assert len(plan.best.seeds) == 6 and plan.doubt is not None
    assert "after 6 seeds, all that search.max_seeds allows; about" in answer(plan)


def test_paired_seeds_tell_what_rates_alone_do_not():
    best, other = [10.0, 20.0, 30.0], [9.0, 18.5, 28.0]
    assert is_beaten(other, best, 0.95)
    assert not is_beaten(best, other, 0.95) and not is_beaten(best, best, 0.95)
    assert not is_beaten([9.0, 25.0, 28.0], best, 0.95)
    assert not is_beaten([1.0], [2.0], 0.95)


def test_the_use_of_an_interval_is_relative_to_its_mean():
    assert Interval(10.0, 9.0, 11.0).is_useful(0.1)
    assert not Interval(10.0, 8.9, 11.1).is_useful(0.1)
    # One that was cut at zero is as wide as its upper half says.
    assert not Interval(12.4, 0.0, 28.9).is_useful(0.5)


def judged(waits_ms):
    """100 requests, one each 10 ms, that have waited so long."""
    count = len(waits_ms)
    workload = Workload(
        "made", array("q", [10 * MS * i for i in range(count)]),
        array("q", [1] * count), array("q", [1] * count),
    )  # fmt: skip
    ledger = Ledger(count)
    for row, wait in enumerate(waits_ms):
        time = 10 * MS * row
        ledger.arrival_ns[row] = ledger.first_scheduled_ns[row] = time
        ledger.first_token_ns[row] = ledger.finish_ns[row] = time + int(wait * MS)
        ledger.status[row] = COMPLETED
    judge = Judge(workload, Slo((Limit("ttft", 90.0, 100.0),)), 0.1, 0.0, True)
    return judge, ledger


def test_slow_first_requests_are_warm_up_and_do_not_end_a_run():
    waits = [500.0] * 22 + [50.0 + i % 3 for i in range(78)]
    judge, ledger = judged(waits)
    assert judge.hopeless(ledger, 10**10) is None
    assert not judge.verdict(ledger, []).met
    judge.cut_warmup(ledger)
    assert 20 <= judge.first <= 25 and judge.num_measured == 100 - judge.first
    assert judge.verdict(ledger, []).met


def test_slow_last_requests_are_no_warm_up():
    waits = [50.0 + i % 3 for i in range(78)] + [500.0] * 22
    judge, ledger = judged(waits)
    assert judge.hopeless(ledger, 10**10) == "p90 ttft"
    judge.cut_warmup(ledger)
    assert not judge.verdict(ledger, []).met


@pytest.mark.parametrize(
    ("search", "complaint"),
    [
        ("max_seeds: 1", "max_seeds=1: must be at least 2"),
        ("max_seeds: 101", "max_seeds=101: must be at most 100"),
        ("width: 0", "width=0: must be"),
        ("multiple: -1", "multiple=-1: must be"),
        ("longest: 0.5", "longest=0.5: must be"),
    ],
)
def test_wrong_limits_are_named(tmp_path, search, complaint):
    with pytest.raises(ValueError, match=re.escape(f"search.{complaint}")):
        study_of(tmp_path, search)


def test_fewer_seeds_than_the_search_begins_with_are_refused(tmp_path):
    path = tmp_path / "study.yaml"
    text = SESSIONS.replace("seeds: 2", "seeds: 8", 1).replace("SEARCH", "max_seeds: 4")
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="must be at least the 8 of seeds"):
        read_study(path)
    path.write_text(text.replace("seeds: 8", "seeds: 20").replace("max_seeds: 4", "keep: 1")
                    .replace("keep: 2, ", ""), encoding="utf-8")  # fmt: skip
    assert read_study(path).search.max_seeds == 20
