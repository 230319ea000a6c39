"""`lockstep sim validate`: recorded, teacher-forced and free-running runs side by side."""

from __future__ import annotations

import json

import numpy as np
import pytest
from recording_testing import (
    make_log,
    make_recording,
    make_workload,
    needs_recordings,
    recording_path,
)

from engine.cli import main
from sim.commands.validate import compare, physics_of
from sim.cost.calibrated import CalibratedCost
from sim.cost.profile import save_profile, shipped_profiles
from sim.run.deployment import Deployment
from sim.run.run import RunPlan, run_plan
from sim.validation.error_report import render_validation
from sim.validation.predicted import free_running, intervals
from sim.validation.recorded import read_run, teacher_forced

(PROFILE,) = shipped_profiles()


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "made.json.gz"
    return make_recording(path), read_run(path)


def test_recorded_latencies_are_the_recordings_own(recorded):
    document, run = recorded
    requests = sorted(document["requests"], key=lambda request: request["added_us"])
    ttft = np.array([one["first_token_us"] - one["arrival_us"] for one in requests]) / 1e3
    e2e = np.array([one["finish_us"] - one["arrival_us"] for one in requests]) / 1e3
    metrics = run.outcome.metrics()
    assert metrics["mean_ttft_ms"] == pytest.approx(ttft.mean())
    assert metrics["p99_ttft_ms"] == pytest.approx(np.percentile(ttft, 99))
    assert metrics["median_e2el_ms"] == pytest.approx(np.median(e2e))
    duration_s = max(one["finish_us"] for one in requests) / 1e6
    tokens = sum(one["output_tokens"] for one in requests)
    assert metrics["output_throughput"] == pytest.approx(tokens / duration_s)


def test_tokens_leave_after_the_output_processing(recorded):
    """The made recording takes 100 us and 10 us per token behind every step."""
    document, run = recorded
    gaps, counts = run.outcome.gaps.distinct()
    assert counts.sum() == sum(one["output_tokens"] - 1 for one in document["requests"])
    busiest = max(len(step[3]) for step in document["steps"])
    assert gaps.min() >= 8_000_000
    assert busiest == 8


def test_teacher_forcing_makes_the_recorded_decisions(recorded):
    _, run = recorded
    cost = CalibratedCost(PROFILE, physics_of(PROFILE))
    outcome, different = teacher_forced(run, cost)
    assert different == 0
    assert (outcome.output_tokens == run.outcome.output_tokens).all()
    errors = outcome.first_token_ns - run.outcome.first_token_ns
    assert np.abs(errors).max() < 2_000_000  # only the host time behind a step is predicted


def test_a_simulated_log_is_predicted_exactly(tmp_path):
    """A log that the simulator wrote with the same profile leaves nothing to explain."""
    made = make_log(tmp_path / "log.jsonl", num_requests=80)
    run = read_run(tmp_path / "log.jsonl")
    free, _ = free_running(run, PROFILE, physics_of(PROFILE))
    assert free.finish_ns.tolist() == list(made.result.ledger.finish_ns)
    assert free.first_token_ns.tolist() == run.outcome.first_token_ns.tolist()
    assert free.metrics() == pytest.approx(run.outcome.metrics(), rel=1e-9)


def test_another_cost_model_is_not(tmp_path):
    """Canary of the test above."""
    make_log(tmp_path / "log.jsonl", num_requests=80, cost="roofline")
    run = read_run(tmp_path / "log.jsonl")
    free, _ = free_running(run, PROFILE, physics_of(PROFILE))
    ratio = free.metrics()["mean_tpot_ms"] / run.outcome.metrics()["mean_tpot_ms"]
    assert abs(ratio - 1) > 0.02


def test_intervals_hold_their_own_mean_and_follow_the_seed(tmp_path):
    make_log(tmp_path / "log.jsonl", num_requests=40)
    run = read_run(tmp_path / "log.jsonl")
    physics = physics_of(PROFILE)
    first = intervals(run, PROFILE, physics, 6, 1)
    for key, (low, high) in first.bounds.items():
        assert low <= first.means[key] * (1 + 1e-12)
        assert first.means[key] <= high * (1 + 1e-12)
    assert first.bounds["mean_tpot_ms"][0] < first.bounds["mean_tpot_ms"][1]
    assert intervals(run, PROFILE, physics, 6, 1) == first
    assert intervals(run, PROFILE, physics, 6, 2) != first


def test_the_page_and_json_hold_every_figure(tmp_path):
    make_log(tmp_path / "log.jsonl", num_requests=40)
    comparison = compare(read_run(tmp_path / "log.jsonl"), PROFILE, False, 3)
    document = json.loads(json.dumps(comparison.to_json(), allow_nan=False))
    assert len(document["metrics"]) == 21
    assert document["decisions"]["different"] == 0
    assert all(row["free_running_error_percent"] < 1e-6 for row in document["metrics"])
    page = render_validation([comparison])
    assert page.count("<svg") == 6
    assert page.count("<tr>") == 22


class TestCommand:
    def test_it_writes_json_and_page(self, tmp_path, capsys):
        make_log(tmp_path / "log.jsonl", num_requests=30)
        out = tmp_path / "v.json"
        assert main(["sim", "validate", str(tmp_path / "log.jsonl"), "--out", str(out)]) == 0
        assert "TPOT p99, ms" in capsys.readouterr().out
        assert json.loads(out.read_text())["runs"][0]["run"] == "log.jsonl"
        assert out.with_suffix(".html").is_file()

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--held-out"], "at least 3 logs"),
            (["--replicates", "1"], "replicates=1"),
            (["--hardware", "h100"], "no shipped profile"),
            (["--profile", "none.json"], "none.json"),
            (["--out", "v.html"], "ends with .json"),
            (["--out", "nowhere/v.json"], "does not exist"),
        ],
    )
    def test_wrong_options_write_nothing(self, tmp_path, capsys, monkeypatch, words, message):
        monkeypatch.chdir(tmp_path)
        make_recording("log.json.gz", 20)
        assert main(["sim", "validate", "log.json.gz", "--out", "v.json", *words]) == 2
        text = capsys.readouterr().err
        assert message in text
        assert text.count("\n") == 1
        assert [path.name for path in tmp_path.iterdir()] == ["log.json.gz"]

    def test_a_profile_for_another_model_is_refused(self, tmp_path, capsys):
        make_recording(tmp_path / "log.json.gz", 20)
        save_profile(PROFILE, tmp_path / "p.json")
        words = ["sim", "validate", str(tmp_path / "log.json.gz")]
        words += ["--profile", str(tmp_path / "p.json"), "--model", "llama-3.1-8b"]
        assert main(words) == 2
        assert "made for model qwen3-8b" in capsys.readouterr().err

    def test_a_log_of_several_replicas_is_refused(self, tmp_path, capsys):
        make_log(tmp_path / "log.jsonl", num_requests=10, replicas=2)
        assert main(["sim", "validate", str(tmp_path / "log.jsonl")]) == 2
        assert "2 replicas" in capsys.readouterr().err


@pytest.mark.shared
@needs_recordings
def test_the_shipped_profile_predicts_a_recorded_run():
    """In sample; the held-out figures are in docs/fidelity.md."""
    comparison = compare(read_run(recording_path("prefix_60")), PROFILE, False)
    assert comparison.different_decisions == 0
    errors = {row["key"]: row["free_running_error_percent"] for row in comparison.rows()}
    assert abs(errors["output_throughput"]) < 1
    for key in ("mean_e2el_ms", "median_e2el_ms", "mean_tpot_ms", "median_tpot_ms"):
        assert abs(errors[key]) < 3, key
    for key in ("mean_ttft_ms", "median_ttft_ms", "p99_e2el_ms"):
        assert abs(errors[key]) < 5, key


def test_the_simulated_duration_is_the_last_token(tmp_path):
    plan = RunPlan(make_workload(10), Deployment(hardware="h200"))
    run = run_plan(plan)
    assert run.result.end_ns == max(run.result.ledger.finish_ns)
