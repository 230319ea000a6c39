"""A pipeline fit finds the two clocks of a made recording, and the simulator repeats its run."""

from __future__ import annotations

import json

import numpy as np
import pytest
from recording_testing import make_async_recording

from engine.cli import main
from engine.steplog.vllm_recording import open_log
from sim.calibration.host_fit import launch_boundary
from sim.calibration.pipeline_evaluate import evaluate_pipeline
from sim.calibration.pipeline_fit import fit_pipeline, launch_ns
from sim.calibration.pipeline_free import percent_errors, predicted_figures, recorded_figures
from sim.calibration.pipeline_samples import pipeline_samples
from sim.cost.pipeline import Host, HostTerms
from sim.cost.profiles import load_any_profile
from sim.cost.terms import Graphs

WORDS = ["--model", "qwen3-8b", "--hardware", "h200", "--graphs", "none"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    paths = [folder / "one.json.gz", folder / "two.json.gz"]
    make_async_recording(paths[0], num_requests=160, gap_us=45_000, token_us=60)
    make_async_recording(paths[1], num_requests=120, gap_us=60_000, token_us=60)
    return paths


@pytest.fixture(scope="module")
def logs(made):
    return [pipeline_samples(open_log(path)) for path in made]


@pytest.fixture(scope="module")
def fit(logs):
    return fit_pipeline(logs, Graphs())


def test_the_device_is_found(logs, fit):
    # Decodes take 5 ms, 20 us a row and 0.1 us a KV token; tokens and rows are not told apart.
    step, sequence, kv_read, recent, *tokens = fit.decode_ns
    assert step == pytest.approx(5e6, rel=0.02)
    assert kv_read == pytest.approx(1e5, rel=0.1)
    assert sequence + tokens[0] == pytest.approx(20e3, rel=0.2)
    assert recent < 2e4


def test_the_host_is_found(logs, fit):
    host = fit.host
    assert host.schedule == pytest.approx(50e3, rel=0.05)
    assert host.schedule_seq == pytest.approx(10e3, rel=0.05)
    assert host.update == pytest.approx(40e3, rel=0.05)
    assert host.update_seq == pytest.approx(5e3, rel=0.05)
    launches = launch_ns(logs[0], host)[logs[0].has_chunks]
    assert launches.mean() == pytest.approx(9e6, rel=0.03)
    assert host.client == pytest.approx(700e3, rel=0.05)
    assert host.client_seq == pytest.approx(10e3, rel=0.1)
    assert Host(host).hand_over_ns(190) == pytest.approx(1.8e6, rel=0.1)


def test_the_end_of_the_graphs_is_found_where_launches_jump(logs, tmp_path):
    assert launch_boundary(logs) == 0
    path = tmp_path / "jump.json.gz"
    make_async_recording(path, num_requests=240, gap_us=45_000, graph_up_to=384)
    jump = [pipeline_samples(open_log(path))]
    assert launch_boundary(jump) == 384
    host = fit_pipeline(jump, Graphs()).host
    assert host.graph_up_to == 384
    assert host.eager_launch > 1.7 * host.graph_launch


def test_each_clock_and_both_together_are_predicted(logs, fit):
    for log in logs:
        fold = evaluate_pipeline(log, fit, Graphs())
        assert fold.decode.mape < 0.5
        assert fold.episode.mape < 3
        assert abs(fold.busy) < 1


def test_a_profile_repeats_the_run_as_the_client_saw_it(made, tmp_path):
    out = tmp_path / "profile.json"
    assert main(["sim", "calibrate", *map(str, made), *WORDS, "--out", str(out)]) == 0
    profile = load_any_profile(out)
    assert profile.is_asynchronous and len(profile.free_running) == 2
    log = pipeline_samples(open_log(made[0]))
    errors = percent_errors(predicted_figures(log, profile, [0]), recorded_figures(log))
    assert abs(errors["output_throughput"]) < 1
    assert all(abs(errors[f"mean_{name}_ms"]) < 3 for name in ("ttft", "tpot", "e2el"))


def test_validate_leaves_each_log_out(made, capsys):
    words = ["sim", "validate", "--held-out", "--json", *map(str, made)]
    assert main(words) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["profile_sources"] for run in runs] == [[], []] or all(
        run["run"] not in run["profile_sources"] for run in runs
    )
    assert all(run["held_out"] and run["scheduling"] == "asynchronous" for run in runs)


def test_synchronous_and_asynchronous_logs_are_not_mixed(made, tmp_path, capsys):
    from recording_testing import make_recording

    make_recording(tmp_path / "sync.json.gz")
    words = ["sim", "calibrate", str(made[0]), str(tmp_path / "sync.json.gz"), *WORDS]
    assert main([*words, "--out", str(tmp_path / "out.json")]) == 2
    assert "by itself" in capsys.readouterr().err


def test_impossible_host_terms_are_refused():
    for value in (-1.0, float("nan"), 1e13):
        with pytest.raises(ValueError, match="schedule"):
            HostTerms(schedule=value)


def test_a_damaged_profile_is_one_line(made, tmp_path, capsys):
    out = tmp_path / "profile.json"
    main(["sim", "calibrate", str(made[0]), *WORDS, "--out", str(out)])
    capsys.readouterr()
    document = json.loads(out.read_text())
    document["decode_terms"][0]["ns"] = -1
    out.write_text(json.dumps(document))
    words = ["sim", "run", "--workload", "poisson", "--model", "qwen3-8b", "--hardware", "h200"]
    assert main([*words, "--async-scheduling", "--cost", f"calibrated:{out}"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "negative" in message


def test_waits_are_nan_where_nothing_was_before(logs):
    assert np.isnan(logs[0].waits[0]) and np.isnan(logs[0].periods[0])
