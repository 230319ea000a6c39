"""`--json` prints one JSON document and nothing else; counters say how long it still takes."""

from __future__ import annotations

import json

import pytest
from recording_testing import make_recording

from engine.cli import main
from sim.commands.counters import Counter, time_left
from tests.places import REPOSITORY

EXCERPT = REPOSITORY / "tests/properties/recordings/data/vllm_v1_0.25.1.excerpt.jsonl.gz"
STUDY = """
workload: {generator: poisson, prompt: 64, output: 16}
slo: {ttft_ms: {p90: 100}}
space: {cost: "constant:5", max_num_seqs: 8}
search: {requests: 200, seeds: 2, verify_seeds: 0}
"""


def document(capsys, *words):
    code = main([str(word) for word in words])
    return code, json.loads(capsys.readouterr().out)


def test_a_replay_says_what_it_compared(tmp_path, capsys):
    make_recording(tmp_path / "log.json.gz", 20)
    code, found = document(capsys, "sim", "replay", tmp_path / "log.json.gz", "--json")
    assert code == 0 and found["requests"] == 20 and found["first_difference"] is None
    assert main(["sim", "replay", str(tmp_path / "log.json.gz")]) == 0
    assert f"{found['steps']} steps: no difference" in capsys.readouterr().out


def test_decisions_count_workloads_by_level(capsys):
    code, found = document(capsys, "verify", "decisions", EXCERPT, "--json")
    (report,) = found["files"]
    assert code == 0 and report["failures"] == []
    for counts in report["levels"].values():
        assert sum(counts.values()) == report["workloads"] and counts["different"] == 0


def test_a_plan_is_what_plan_json_holds(tmp_path, capsys):
    (tmp_path / "s.yaml").write_text(STUDY)
    code, found = document(capsys, "sim", "plan", tmp_path / "s.yaml", "--json", "--quiet")
    assert code == 0 and found == json.loads((tmp_path / "s-plan/plan.json").read_text())


def test_a_validation_is_what_its_file_holds(tmp_path, capsys):
    make_recording(tmp_path / "log.json.gz", 60)
    out = tmp_path / "v.json"
    words = ("sim", "validate", tmp_path / "log.json.gz", "--json", "--out", out)
    code, found = document(capsys, *words)
    assert code == 0 and found == json.loads(out.read_text())
    assert len(found["runs"]) == 1


@pytest.mark.parametrize(
    ("passed_s", "done", "total", "text"),
    [
        (10, 0, 10, ""),
        (10, 10, 10, ""),
        (10, 1, 5, ", about 40 s left"),
        (60, 1, 11, ", about 10 min left"),
        (3600, 1, 3, ", about 2.0 h left"),
    ],
)
def test_the_time_left_follows_the_pace_so_far(passed_s, done, total, text):
    assert time_left(passed_s, done, total) == text


def test_a_counter_draws_one_line_on_a_terminal_and_nothing_elsewhere(capsys, monkeypatch):
    clock = iter([0.0, 1.0, 1.1, 2.0])
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    counter = Counter(4, "requests", clock=lambda: next(clock))
    for done in (1, 2, 4):
        counter(done)
    counter.end()
    drawn = capsys.readouterr().err
    assert "1 of 4 requests, about 3 s left" in drawn and "2 of 4" not in drawn
    assert drawn.endswith("4 of 4 requests\n") and drawn.count("\n") == 1
    silent = Counter(4, "requests", shown=False)
    silent(1)
    silent.end()
    assert capsys.readouterr().err == ""
