"""Percentiles: numpy's linear ones for values, and the same for values pooled with counts."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.metrics.percentiles import gap_percentiles, percentiles
from sim.metrics.token_gaps import GapPool

PERCENTS = (0.0, 5.0, 50.0, 90.0, 99.0, 100.0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 5)), min_size=1, max_size=40))
def test_pooled_gaps_have_the_percentiles_of_the_values_written_out(pairs):
    pool = GapPool()
    for gap, count in pairs:
        pool.add(gap, count)
    plain = [gap for gap, count in pairs for _ in range(count)]
    assert np.allclose(gap_percentiles(pool, PERCENTS), np.percentile(plain, PERCENTS), rtol=1e-12)
    assert percentiles(plain, PERCENTS) == np.percentile(plain, PERCENTS).tolist()


def test_infinite_values_make_no_nan():
    assert percentiles([1.0, 2.0, math.inf, math.inf], (0, 50, 75, 100)) == [
        1.0, math.inf, math.inf, math.inf,
    ]  # fmt: skip


def test_nothing_measured_is_no_number():
    assert all(map(math.isnan, percentiles([], (50,))))
    assert all(map(math.isnan, gap_percentiles(GapPool(), (50,))))
