"""The noise that replicates of a simulation draw."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from engine.core import InputError
from sim.cost.calibrated import CalibratedCost
from sim.cost.noise import Noise, Replicate, replicates, student_quantile
from sim.cost.physics import Physics
from sim.cost.profile import shipped_profiles
from sim.cost.terms import KINDS, SHARED_READ_RANGE
from sim.specs.hardware import hardware_named
from sim.specs.models import model_named

(PROFILE,) = shipped_profiles()
PHYSICS = Physics(model_named("qwen3-8b"), hardware_named("h200"))


def test_it_is_a_function_of_the_seed():
    draws = [Noise(PROFILE.noise, 5).peek(0, 300) for _ in range(2)]
    assert draws[0] == draws[1] != Noise(PROFILE.noise, 6).peek(0, 300)


def test_replicates_differ_as_runs_do():
    """The spread of replicate means is at least that of the logs' means."""
    means = [
        np.mean(Noise(PROFILE.noise, seed, replicate).peek(0, 4000))
        for seed, replicate in enumerate(replicates(200, 0))
    ]
    logs = np.std([source.mean for source in PROFILE.noise], ddof=1)
    assert logs * 0.8 < np.std(means) < logs * 4


def test_the_shift_is_the_quantile_of_a_further_run():
    """Student's prediction interval from the means of the five logs."""
    means = [source.mean for source in PROFILE.noise]
    for level in (0.05, 0.3, 0.5, 0.95):
        expected = stats.t.ppf(level, 4) * np.std(means, ddof=1) * np.sqrt(1 + 1 / 5)
        assert Noise(PROFILE.noise, 3, Replicate(level)).shift == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("freedom", [1, 2, 4, 30])
def test_students_quantiles(freedom):
    wanted = [(place + 0.5) / 41 for place in range(41)]
    found = [student_quantile(level, freedom) for level in wanted]
    assert found == pytest.approx(stats.t.ppf(wanted, freedom), rel=1e-4, abs=1e-6)


def test_every_kind_of_step_has_errors():
    for seed in range(10):
        noise = Noise(PROFILE.noise, seed)
        for kind in range(len(KINDS)):
            assert len(noise.peek(kind, 100)) == 100


def test_a_profile_of_one_log_has_none():
    with pytest.raises(InputError, match="no held-out errors"):
        Noise((), 0)


def test_replicates_share_out_both_unknowns_and_their_pairs():
    found = replicates(50, 3)
    costs = np.array([one.shared_read_cost for one in found])
    low, high = SHARED_READ_RANGE
    assert [one.level for one in found] == pytest.approx([0.01 + 0.02 * i for i in range(50)])
    assert low <= costs.min() < costs.max() <= high
    assert np.diff(np.sort(costs)).max() < 2 * (high - low) / 50
    for half in (costs[:25], costs[25:]):
        assert np.median(half) == pytest.approx((low + high) / 2, abs=0.02)
    assert replicates(50, 4) != found


def test_a_shared_read_costs_what_the_replicate_says():
    context, shared = 60_000, 20_000
    times = [
        CalibratedCost(
            PROFILE, PHYSICS, Noise(PROFILE.noise, 1, Replicate(shared_read_cost=share))
        ).decode_run_ns(30, context, 1, shared)[0]
        for share in (0.4, 0.6, 1.0)
    ]
    assert times[0] < times[1] < times[2]
    assert (times[2] - times[1]) / (times[1] - times[0]) == pytest.approx(2, rel=1e-3)
