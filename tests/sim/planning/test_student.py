"""Student's quantiles against scipy's, and the interval that planning states with them."""

from __future__ import annotations

import math
import statistics

import pytest
from scipy.stats import t

from sim.planning.capacity import interval_of
from sim.planning.student import student_quantile


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99, 0.999])
def test_quantiles_are_those_of_scipy_at_every_count(confidence):
    for freedom in (*range(1, 41), 99, 100, 500, 501):
        wanted = t.ppf((1 + confidence) / 2, freedom)
        assert student_quantile(confidence, freedom) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("count", [2, 11, 12, 13, 30])
def test_the_interval_of_a_capacity_uses_them_for_every_number_of_seeds(count):
    rates = [10 + (seed % 3) for seed in range(count)]
    half = t.ppf(0.975, count - 1) * statistics.stdev(rates) / math.sqrt(count)
    interval = interval_of(rates, 0.95, 0.0)
    assert interval.high - interval.mean == pytest.approx(half)
    assert interval.mean - interval.low == pytest.approx(half)
