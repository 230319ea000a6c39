"""Whole tiny studies: the same plan from any executor, after a kill, and despite failures."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from engine.cli import main
from sim.planning.cache import ResultCache
from sim.planning.executors import SerialExecutor, make_executor
from sim.planning.interleave import Driver, Failure
from sim.planning.parse import read_study
from sim.planning.sampling import load_source
from sim.planning.space import all_choices, candidate_of
from sim.planning.trial import Trial, Worker

STUDY = """
workload: {generator: poisson, prompt: 64, output: 16}
slo: {ttft_ms: {p90: 100}, tpot_ms: {p90: 12}}
space: {cost: "constant:5", max_num_seqs: [4, 8], hardware: h200, model: qwen3-0.6b}
search: {requests: 200, seeds: 2, max_seeds: 2, keep: 1, tolerance: 0.05, verify_seeds: 1,
  verify_factor: 2}
"""
MIN_COST = """
workload: {generator: poisson, prompt: 64, output: 16}
slo: {ttft_ms: {p90: 100}}
objective: {kind: min_cost, rate: 60}
space: {cost: "constant:5", max_num_seqs: 4, hardware: h200, model: qwen3-0.6b, replicas: auto}
prices: {h200: 2}
search: {requests: 200, seeds: 2, max_seeds: 2, keep: 1, tolerance: 0.1, verify_seeds: 0}
"""


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(STUDY, encoding="utf-8")
    return path


def plan(path: Path, out: Path, *options: str) -> bytes:
    # Runs as short as these are often contradicted, which is an answer too.
    assert main(["sim", "plan", str(path), "--out", str(out), "--quiet", *options]) in (0, 3)
    return (out / "plan.json").read_bytes()


def test_processes_and_a_resumed_study_give_the_same_plan(study, tmp_path):
    whole = plan(study, tmp_path / "one")
    assert plan(study, tmp_path / "two", "--jobs", "2") == whole
    kept = sorted((tmp_path / "two" / "cache").iterdir())
    assert len(kept) > 10
    for path in kept[::2]:
        path.unlink()
    kept[1].write_text("{", encoding="utf-8")  # as if the disk had filled up
    assert plan(study, tmp_path / "two") == whole
    document = json.loads(whole)
    assert document["recommended"] == "max_num_seqs=8"
    best, other = document["ranking"]
    assert best["capacity"] > 1.5 * other["capacity"]
    assert best["interval"][0] < best["capacity"] < best["interval"][1]
    assert best["limited_by"] == "sequences"


def test_a_killed_study_resumes_to_the_same_plan(study, tmp_path):
    whole = plan(study, tmp_path / "one")
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "engine", "sim", "plan", str(study), "--out", str(out)]
    process = subprocess.Popen(
        [*command, "--jobs", "2", "--quiet"], cwd=Path(__file__).parents[3], start_new_session=True
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len(list(out.glob("cache/*.json"))) < 5:
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (out / "plan.json").exists()
    assert len(list(out.glob("cache/*.json"))) >= 5
    assert plan(study, out) == whole


def test_the_report_is_one_file_with_plots_and_command_lines(study, tmp_path):
    plan(study, tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 4
    assert "vllm serve Qwen/Qwen3-0.6B --max-num-seqs 8" in page
    assert "lockstep bench throughput --model Qwen3-0.6B --policy mixed" in page
    assert "Pareto front" in page and "SLO" in page
    opening = page[: page.index("Configurations, best first")]
    assert "1 x h200" in opening and f"lockstep sim plan {study}" in opening
    assert not re.search(r'(src|href)="', page)


def test_the_cheapest_fleet_serves_the_rate_for_sure(tmp_path, capsys):
    path = tmp_path / "study.yaml"
    path.write_text(MIN_COST, encoding="utf-8")
    document = json.loads(plan(path, tmp_path / "out"))
    best = document["ranking"][0]
    assert best["serves_rate"] and best["interval"][0] >= 60
    smaller = [one for one in document["ranking"] if one["gpus"] < best["gpus"]]
    assert smaller
    for one in smaller:
        assert not one["serves_rate"]
    assert best["price_per_hour"] == 2 * best["gpus"]
    assert f"{best['gpus']} GPUs have a capacity of" in capsys.readouterr().out


def test_nothing_meets_it_is_one_sentence_with_the_closest(study, tmp_path, capsys):
    study.write_text(STUDY.replace("p90: 12", "p90: 1"), encoding="utf-8")
    out = tmp_path / "out"
    assert main(["sim", "plan", str(study), "--out", str(out), "--quiet"]) == 1
    error = capsys.readouterr().err.strip()
    assert "nothing meets the SLO" in error and "\n" not in error
    assert re.search(r"the closest is max_num_seqs=\d at .*: p90 tpot 5 ms, 5 x its limit", error)
    document = json.loads((out / "plan.json").read_text(encoding="utf-8"))
    assert document["recommended"] is None


def test_a_failing_configuration_does_not_stop_the_others(study, tmp_path, capsys):
    recorded = tmp_path / "steps.jsonl"
    run = ["sim", "run", "--workload", "poisson", "--num-requests", "1", "--output-len", "2"]
    assert main([*run, "--out", str(tmp_path / "run")]) == 0
    (tmp_path / "run" / "steps.jsonl").rename(recorded)
    text = STUDY.replace('"constant:5"', f'["constant:5", "replay:{recorded}"]')
    study.write_text(text.replace("[4, 8]", "8"), encoding="utf-8")
    document = json.loads(plan(study, tmp_path / "out"))
    assert document["recommended"] == "cost=constant:5"
    failed = document["ranking"][1]
    assert failed["configuration"] == {"cost": "replay:steps.jsonl"}
    assert "needs more than the" in failed["failure"]


def trials_of(path: Path) -> tuple[object, list[Trial]]:
    study = read_study(path)
    candidate = candidate_of(study, next(all_choices(study)))
    trials = [
        Trial(candidate, rate, seed, 200, study.slo, study.link, 0.1, 0.1)
        for rate in (20.0, 40.0)
        for seed in (0, 1)
    ]
    return load_source(study.workload), trials


def test_searches_share_a_trial_and_a_failure_ends_only_its_search(study, tmp_path):
    source, trials = trials_of(study)
    told = []

    def asks_for(*wanted):
        results = yield list(wanted)
        return [result.seed for result in results]

    broken = Trial(*[getattr(trials[0], name) for name in Trial.__slots__])
    object.__setattr__(broken, "num_requests", 0)
    with SerialExecutor(partial(Worker, source)) as executor:
        driver = Driver(
            executor, ResultCache(tmp_path / "cache", source), lambda *event: told.append(event)
        )
        answers = driver.run(
            [
                ("one", asks_for(trials[0], trials[1])),
                ("two", asks_for(trials[1], trials[1])),
                ("bad", asks_for(broken)),
            ]
        )
    assert answers[:2] == [[0, 1], [1, 1]]
    assert isinstance(answers[2], Failure)
    assert len(told) == 3


def test_labels_and_file_places_are_no_part_of_a_trials_name(study, tmp_path):
    source, trials = trials_of(study)
    cache = ResultCache(tmp_path / "cache", source)
    keys = {cache.key(trial) for trial in trials}
    assert len(keys) == 4
    again = ResultCache(tmp_path / "other", source)
    assert {again.key(trial) for trial in trials} == keys


def test_tpe_finds_the_best_of_a_space(study, tmp_path):
    pytest.importorskip("optuna")
    text = STUDY.replace("[4, 8]", "[2, 4, 6, 8]").replace("keep: 1", "keep: 1, method: tpe")
    study.write_text(text.replace("seeds: 2", "seeds: 2, trials: 8", 1), encoding="utf-8")
    document = json.loads(plan(study, tmp_path / "out"))
    assert document["recommended"] == "max_num_seqs=8"


def test_a_missing_extra_is_named(study, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["sim", "plan", str(study), "--out", str(tmp_path), "--ray", "local"]) == 1
    assert "lockstep-llm[ray]" in capsys.readouterr().err


def test_one_job_runs_in_this_process(study):
    source, _ = trials_of(study)
    assert isinstance(make_executor(source, 1, None), SerialExecutor)


def test_fleets_apart_and_together_are_compared(tmp_path):
    """Two mixed servers against one for prefill and one for decode, and a slow link."""
    path = tmp_path / "study.yaml"
    text = STUDY.replace("max_num_seqs: [4, 8]", "max_num_seqs: 8, fleet: [pair, apart]")
    text += (
        "fleets: {pair: [{count: 2}], apart: [{role: prefill}, {role: decode}]}\n"
        "kv_transfer: {gb_per_s: 0.5}\n"
    )
    path.write_text(text.replace("verify_seeds: 1", "verify_seeds: 0"), encoding="utf-8")
    document = json.loads(plan(path, tmp_path / "out"))
    assert document["recommended"] == "fleet=pair"
    by_fleet = {one["configuration"]["fleet"]: one for one in document["ranking"]}
    assert [server["role"] for server in by_fleet["apart"]["servers"]] == ["prefill", "decode"]
    # 64 tokens take 15 ms on the link, so it cannot carry more than 68 requests a second.
    assert 0 < by_fleet["apart"]["capacity"] < 70 < by_fleet["pair"]["capacity"]
