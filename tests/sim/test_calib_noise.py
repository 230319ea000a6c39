"""The noise that replicates of a simulation draw."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from engine.core import InputError
from sim.calibration.evaluate import KINDS
from sim.calibration.noise import Noise, levels, student_quantile
from sim.calibration.profile import shipped_profiles

(PROFILE,) = shipped_profiles()


def test_it_is_a_function_of_the_seed():
    draws = [Noise(PROFILE.noise, 5).peek(0, 300) for _ in range(2)]
    assert draws[0] == draws[1] != Noise(PROFILE.noise, 6).peek(0, 300)


def test_replicates_differ_as_runs_do():
    """The spread of replicate means is at least that of the logs' means."""
    means = [
        np.mean(Noise(PROFILE.noise, seed, level).peek(0, 4000))
        for seed, level in enumerate(levels(200))
    ]
    logs = np.std([source.mean for source in PROFILE.noise], ddof=1)
    assert logs * 0.8 < np.std(means) < logs * 4


def test_the_shift_is_the_quantile_of_a_further_run():
    """Student's prediction interval from the means of the five logs."""
    means = [source.mean for source in PROFILE.noise]
    for level in (0.05, 0.3, 0.5, 0.95):
        expected = stats.t.ppf(level, 4) * np.std(means, ddof=1) * np.sqrt(1 + 1 / 5)
        assert Noise(PROFILE.noise, 3, level).shift == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("freedom", [1, 2, 4, 30])
def test_students_quantiles(freedom):
    wanted = levels(41)
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
