"""Warm-up and time scales, on series whose answers are known."""

from __future__ import annotations

import math
from array import array

import numpy as np
import pytest

from sim.metrics.requests import COMPLETED, Ledger
from sim.metrics.steady import correlation_length, longest_scale, mser5, span_ns, thinking_ns
from sim.workloads.table import AFTER_PREDECESSOR, Workload

RNG = np.random.default_rng(5)


def autoregressive(phi, count, seed):
    noise = np.random.default_rng(seed).normal(size=count)
    values = np.empty(count)
    values[0] = noise[0] / math.sqrt(1 - phi**2)
    for index in range(1, count):
        values[index] = phi * values[index - 1] + noise[index]
    return values


@pytest.mark.parametrize("length", [50, 200])
@pytest.mark.parametrize("size", [-8.0, 8.0])
def test_mser_cuts_a_transient_whichever_way_it_goes(length, size):
    series = RNG.normal(size=1000)
    series[:length] += np.linspace(size, 0, length)
    cut = mser5(series, 250)
    assert 0.4 * length <= cut <= length + 40


def test_mser_leaves_most_of_a_steady_series_and_never_cuts_more_than_allowed():
    cuts = [mser5(np.random.default_rng(seed).normal(size=1000), 250) for seed in range(40)]
    assert np.median(cuts) <= 100
    growing = np.arange(1000.0)
    assert mser5(growing, 250) == 250 and mser5(growing, 103) == 100
    assert mser5(growing[:10], 5) == 0 and mser5(growing, 0) == 0


def test_mser_is_the_minimum_of_whites_statistic():
    series = autoregressive(0.8, 300, 3) + np.where(np.arange(300) < 40, 5, 0)
    batches = series.reshape(60, 5).mean(axis=1)
    errors = [np.var(batches[cut:]) / (60 - cut) for cut in range(16)]
    assert mser5(series, 75) == 5 * int(np.argmin(errors))


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.9])
def test_the_correlation_length_of_an_autoregressive_series(phi):
    lengths = [correlation_length(autoregressive(phi, 20_000, seed)) for seed in range(5)]
    assert np.mean(lengths) == pytest.approx((1 + phi) / (1 - phi), rel=0.15)


def test_constant_and_empty_series_have_length_one():
    assert correlation_length(np.full(100, 3.3)) == 1.0
    assert correlation_length(np.empty(0)) == correlation_length(np.ones(1)) == 1.0


def finished(workload, times):
    """A ledger with (arrival, first token, finish) of each row; None leaves it pending."""
    ledger = Ledger(len(workload))
    for row, one in enumerate(times):
        if one is not None:
            ledger.arrival_ns[row] = ledger.first_scheduled_ns[row] = one[0]
            ledger.first_token_ns[row], ledger.finish_ns[row] = one[1:]
            ledger.status[row] = COMPLETED
    return ledger


def sessions():
    """Two sessions: rows 0 and 1 with thinking of 4 s, and row 2 alone."""
    return Workload(
        "made",
        array("q", [0, AFTER_PREDECESSOR, 10**9]),
        array("q", [1] * 3),
        array("q", [1] * 3),
        next_row=array("q", [1, -1, -1]),
        think_ns=array("q", [4 * 10**9, 7 * 10**9, 9 * 10**9]),
    )


def test_a_session_lasts_from_its_first_arrival_to_its_last_end():
    second = 10**9
    ledger = finished(
        sessions(), [(0, 0, 0), (5 * second, 6 * second, 8 * second), (second, second, second)]
    )
    scale = longest_scale(sessions(), ledger)
    assert (scale.name, scale.seconds) == ("session", 4.0)  # the mean of 8 s and 0 s


def test_unfinished_sessions_do_not_count():
    ledger = finished(sessions(), [(0, 0, 10**9), None, (10**9, 2 * 10**9, 3 * 10**9)])
    assert longest_scale(sessions(), ledger).seconds == 2.0
    assert longest_scale(sessions(), finished(sessions(), [None] * 3)).seconds == math.inf


def test_thinking_before_a_last_turn_is_none():
    assert thinking_ns(sessions()) == 2e9  # 4 s in one of two sessions
    assert span_ns(sessions()) == 10**9
    plain = Workload("made", array("q", [0, 5]), array("q", [1, 1]), array("q", [1, 1]))
    assert thinking_ns(plain) == 0.0
