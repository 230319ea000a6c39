"""What the recording's host adds to step times: its pauses and its drifting speed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recording_testing import make_log, make_recording, make_workload

from engine.core import InputError
from sim.calibration.build import calibrate, graphs_of, noise_of, target_of
from sim.calibration.evaluate import evaluate
from sim.calibration.fit import fit_steps, fit_tracking, leave_one_out
from sim.calibration.host_speed import one_step_ahead
from sim.calibration.pauses import PausingCost, find_pauses, fit_pauses
from sim.calibration.samples import read_samples
from sim.cluster.simulation import RunOptions
from sim.commands.validate import physics_of
from sim.cost.calibrated import CalibratedCost
from sim.cost.features import StepFeatures
from sim.cost.physics import Physics
from sim.cost.profile import Pauses, Tracking, load_profile, save_profile, shipped_profiles
from sim.run.deployment import Deployment, build
from sim.run.run import RunPlan, run_plan
from sim.specs.hardware import hardware_named
from sim.specs.models import model_named
from sim.validation.predicted import free_running, has_pauses
from sim.validation.recorded import read_run

(PROFILE,) = shipped_profiles()
PHYSICS = Physics(model_named("qwen3-8b"), hardware_named("h200"))
PAUSES = Pauses(every_entries=5_000, ns_per_entry=6_000.0)


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    found = []
    for gap_ms in (20, 40, 60):
        make_log(folder / f"{gap_ms}.jsonl", gap_ms)
        found.append(read_samples(folder / f"{gap_ms}.jsonl"))
    return found


def entries_of(log):
    return log.column("num_decodes") + log.column("num_chunks")


def with_pauses(log, pauses):
    """The log with the gap behind every so many entries longer."""
    entries = np.cumsum(entries_of(log))
    due = np.diff(entries // pauses.every_entries, prepend=0) > 0
    return replace(log, gap_ns=log.gap_ns + due * entries * pauses.ns_per_entry)


class TestPauses:
    def test_planted_pauses_are_found_and_measured(self, samples):
        planted = [with_pauses(log, PAUSES) for log in samples]
        fit = fit_steps(samples, PROFILE.graphs)
        found = fit_pauses(planted, fit, PROFILE.graphs)
        assert found.every_entries == pytest.approx(PAUSES.every_entries, rel=0.15)
        assert found.ns_per_entry == pytest.approx(PAUSES.ns_per_entry, rel=0.05)

    def test_pauses_inside_steps_are_found_too(self, samples):
        log = samples[0]
        late = log.duration_ns.copy()
        late[[200, 400]] += 60e6
        fit = fit_steps(samples, PROFILE.graphs)
        found = find_pauses(replace(log, duration_ns=late), fit, PROFILE.graphs)
        assert found.steps == (200, 400)
        assert found.lengths_ns == pytest.approx([60e6, 60e6], rel=0.05)

    def test_a_log_without_pauses_has_none(self, samples):
        fit = fit_steps(samples, PROFILE.graphs)
        assert fit_pauses(samples, fit, PROFILE.graphs) is None

    def test_pauses_are_no_noise_of_steps(self, samples):
        log = samples[0]
        late = log.duration_ns.copy()
        late[np.flatnonzero(~log.is_mixed)[::64]] += 200e6  # would begin every block of noise
        fold = evaluate(
            replace(log, duration_ns=late), fit_steps(samples, PROFILE.graphs), PROFILE.graphs
        )
        noise = noise_of(replace(log, duration_ns=late), fold, PROFILE.graphs)
        assert max(error for kind in noise.kinds for block in kind for error in block) < 0.5

    @settings(max_examples=60, deadline=None)
    @given(st.integers(1, 256), st.integers(1, 400), st.integers(0, 20_000))
    def test_a_decode_run_pauses_where_its_steps_do(self, rows, count, before):
        run, steps = (PausingCost(CalibratedCost(PROFILE, PHYSICS), PAUSES) for _ in range(2))
        for cost in (run, steps):
            cost.observe(StepFeatures(1, 100, (), 1), before)
        together = run.decode_run_ns(rows, 300 * rows, count)
        single = []
        for step in range(count):
            features = StepFeatures(rows, 300 * rows + step * rows, (), rows)
            single.append(steps.step_time_ns(features))
            steps.observe(features, 1)
        assert together == single

    def test_they_last_as_long_as_all_entries_up_to_them_take(self):
        plain, pausing = CalibratedCost(PROFILE, PHYSICS), PausingCost(
            CalibratedCost(PROFILE, PHYSICS), PAUSES
        )  # fmt: skip
        rows, steps = 100, 155
        extra = np.array(pausing.decode_run_ns(rows, 30_000, steps)) - np.array(
            plain.decode_run_ns(rows, 30_000, steps)
        )
        at = np.flatnonzero(extra)
        assert at.tolist() == [49, 99, 149]
        assert extra[at].tolist() == [5_000 * 6_000, 10_000 * 6_000, 15_000 * 6_000]

    def test_fast_forward_equals_step_by_step(self):
        runs = []
        for step_by_step in (False, True):
            options = RunOptions(step_by_step=step_by_step)
            plan = RunPlan(make_workload(60), Deployment(hardware="h200"), options)
            parts = build(plan.deployment, 0)
            (cost,) = parts.costs
            pausing = PausingCost(cost, Pauses(500, 9_000.0))
            runs.append(run_plan(plan, replace(parts, costs=(pausing,))))
        first, second = runs
        assert list(first.result.ledger.finish_ns) == list(second.result.ledger.finish_ns)
        assert first.summary.sim.load.num_steps == second.summary.sim.load.num_steps

    def test_only_recordings_pause(self, tmp_path):
        make_recording(tmp_path / "made.json.gz")
        make_log(tmp_path / "log.jsonl", num_requests=80)
        profile = replace(PROFILE, pauses=Pauses(100, 1_000_000.0))
        recording, log = read_run(tmp_path / "made.json.gz"), read_run(tmp_path / "log.jsonl")
        assert has_pauses(recording, profile)
        assert not has_pauses(recording, replace(profile, pauses=None))
        assert not has_pauses(log, profile)
        physics = physics_of(profile)
        slow, fast = (
            free_running(recording, one, physics)[0].end_ns
            for one in (profile, replace(profile, pauses=None))
        )
        assert slow > fast + 100_000_000


class TestTracking:
    def test_a_drifting_host_is_followed(self, samples):
        """With a speed that changes slowly, most of the error is gone one step ahead."""
        drifting = [drift(log, phase) for phase, log in enumerate(samples)]
        for fold in leave_one_out(drifting, PROFILE.graphs):
            assert fold.ahead["decode"].mape < 0.5 * fold.errors["decode"].mape

    def test_noise_is_not_followed(self, samples):
        """Canary of the test above: errors without memory cannot be predicted."""
        rng = np.random.default_rng(0)
        noisy = [
            replace(log, duration_ns=log.duration_ns * rng.lognormal(0, 0.08, len(log)))
            for log in samples
        ]
        for fold in leave_one_out(noisy, PROFILE.graphs):
            assert 0.95 < fold.ahead["decode"].mape / fold.errors["decode"].mape < 1.1

    def test_a_prediction_knows_the_past_only(self, samples):
        log = drift(samples[0], 0)
        fit = fit_steps([log], PROFILE.graphs)
        tracking = fit_tracking([log], fit, PROFILE.graphs)
        changed = log.duration_ns.copy()
        changed[300:] *= 1.2
        before = one_step_ahead(log, fit, PROFILE.graphs, tracking)
        after = one_step_ahead(replace(log, duration_ns=changed), fit, PROFILE.graphs, tracking)
        assert (before[:301] == after[:301]).all()
        assert (before[301:320] != after[301:320]).all()

    def test_kinds_without_steps_follow_nothing(self, samples):
        decode = samples[0]
        rows = ~decode.is_mixed
        only = replace(
            decode,
            work=decode.work[rows],
            **{
                name: getattr(decode, name)[rows]
                for name in ("duration_ns", "gap_ns", "num_finished", "num_added", "added_tokens",
                             "start_ns", "host_ns")
            },
        )  # fmt: skip
        fit = fit_steps([only], PROFILE.graphs)
        tracking = fit_tracking([only], fit, PROFILE.graphs)
        assert tracking.follows[1:] == (0.0, 0.0, 0.0)
        assert min(tracking.shows) > 0


def drift(log, phase):
    """The log on a host whose speed swings by a tenth within 200 steps."""
    swing = 1 + 0.1 * np.sin(2 * np.pi * np.arange(len(log)) / 200 + phase)
    return replace(log, duration_ns=log.duration_ns * swing)


class TestProfile:
    def test_pauses_and_tracking_survive_their_file(self, tmp_path, samples):
        make_recording(tmp_path / "made.json.gz", num_requests=300)
        log = with_pauses(read_samples(tmp_path / "made.json.gz"), Pauses(800, 80_000.0))
        target = target_of(model_named("qwen3-8b"), "h200", "bfloat16", 1, "")
        made = calibrate([log], [tmp_path / "made.json.gz"], target, graphs_of([log], "auto"))
        assert made.profile.pauses is not None
        save_profile(made.profile, tmp_path / "p.json")
        loaded = load_profile(tmp_path / "p.json")
        assert loaded.pauses == made.profile.pauses
        assert loaded.tracking == made.profile.tracking

    def test_a_profile_may_have_neither(self, tmp_path):
        save_profile(replace(PROFILE, pauses=None, tracking=None), tmp_path / "p.json")
        loaded = load_profile(tmp_path / "p.json")
        assert loaded.pauses is None
        assert loaded.tracking is None

    @pytest.mark.parametrize(
        "part",
        [
            {"pauses": Pauses(0, 1.0)},
            {"pauses": Pauses(10, -1.0)},
            {"tracking": Tracking((1.0,), (1.0,))},
            {"tracking": Tracking((1.0, 1.0, 1.0, 0.0), (1.0, 1.0, 1.0, 1.0))},
            {"tracking": Tracking((1.0, 1.0, 1.0, 1.0), (1.0, -1.0, 1.0, 1.0))},
        ],
    )
    def test_impossible_ones_are_refused(self, tmp_path, part):
        save_profile(replace(PROFILE, **part), tmp_path / "p.json")
        with pytest.raises(InputError, match="damaged profile"):
            load_profile(tmp_path / "p.json")
