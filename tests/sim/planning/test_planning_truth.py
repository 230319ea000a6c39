"""Studies whose capacity a formula knows; `benchmarks/planner_truth.py` has eight, many times."""

from __future__ import annotations

import pytest

from benchmarks.planner_truth import (
    MEAN_GEOMETRIC,
    STEP_S,
    carry_out,
    cases,
    cyclic_deterministic,
    erlang_c,
    geometric_column,
    geometric_servers,
    moments,
    pollaczek_khinchine,
    wait_sums,
)


def test_the_interval_of_a_study_covers_the_capacity_that_a_formula_gives(tmp_path):
    case = cases()[0]
    found = carry_out(case, 0, tmp_path, 400)
    assert found["covered"] and found["useful"] and found["steady"], (found, case.truth())
    # An interval that covers everything would tell nothing.
    assert found["high"] - found["low"] < 0.25 * case.truth()


def test_one_server_of_many_is_the_single_server():
    exact = pollaczek_khinchine(8 * STEP_S, (8 * STEP_S) ** 2)
    for rate in (3.0, 9.0, 11.0):
        assert cyclic_deterministic(1, 8)(rate) == pytest.approx(exact(rate), rel=1e-6)


def test_deterministic_servers_wait_about_half_as_long_as_exponential_ones():
    wait = cyclic_deterministic(3, 1)(0.8 * 3 / STEP_S) / STEP_S
    exponential = erlang_c(3, 2.4) / (3 - 2.4)
    assert 0.5 * exponential < wait < 0.56 * exponential


def test_four_geometric_servers_wait_nearly_as_exponential_ones():
    rate = 40.0
    load = rate * MEAN_GEOMETRIC * STEP_S
    exponential = erlang_c(4, load) / (4 - load) * MEAN_GEOMETRIC * STEP_S
    # The rest of a step comes on top; lengths of whole steps vary a little less.
    found = geometric_servers(4)(rate) - STEP_S / 2
    assert 0.85 * exponential < found < 1.02 * exponential


def test_the_distribution_of_a_wait_has_the_mean_of_the_formula():
    lengths = geometric_column()
    first, second = moments(lengths)
    assert first == pytest.approx(MEAN_GEOMETRIC * STEP_S, rel=1e-3)
    rate = 9.0
    sums = wait_sums(rate, lengths)
    mean = float((1 - sums[:4000]).sum()) * STEP_S / 8  # 5 s: what lies beyond rings
    assert mean == pytest.approx(pollaczek_khinchine(first, second)(rate), rel=0.03)
    assert 1 - sums[0] == pytest.approx(rate * first, rel=0.05)  # those that find it busy


def test_a_truth_is_the_rate_at_which_its_limit_is_met():
    for case in (one for one in cases() if one.seats == 1):
        truth = case.truth()
        assert 0.5 * case.highest < truth < 0.95 * case.highest
        assert case.ttft_s(truth) * 1e3 == pytest.approx(case.limit_ms, rel=0.01)
