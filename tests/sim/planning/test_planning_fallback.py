"""Configurations that leave the range of the calibrated profile are run with other costs."""

from __future__ import annotations

import json

import pytest

from engine.cli import main

STUDY = """
workload: {generator: poisson, prompt: 256, output: 32}
slo: {ttft_ms: {p90: 2000}}
space: {cost: COST, max_num_batched_tokens: [1024, 8192], hardware: h200, model: qwen3-8b}
search: {requests: 200, seeds: 2, max_seeds: 2, multiple: 0, keep: 2, tolerance: 0.1,
  verify_seeds: 0}
"""


def planned(tmp_path, text):
    path = tmp_path / "study.yaml"
    path.write_text(text, encoding="utf-8")
    assert main(["sim", "plan", str(path), "--quiet"]) == 0
    document = json.loads((tmp_path / "study-plan" / "plan.json").read_text(encoding="utf-8"))
    entries = document["ranking"]
    return document, {one["configuration"]["max_num_batched_tokens"]: one for one in entries}


def kind(entry):
    return entry["servers"][0]["trust"]["kind"]


def test_auto_costs_fall_back_beyond_the_calibrated_range(tmp_path):
    document, by_budget = planned(tmp_path, STUDY.replace("COST", "auto"))
    assert kind(by_budget[1024]) == "calibrated" and kind(by_budget[8192]) == "roofline"
    assert by_budget[8192]["capacity"] > 0 and by_budget[8192]["failure"] is None
    (note,) = [one for one in by_budget[8192]["notes"] if "roofline instead" in one]
    assert float(note.partition("%")[0]) > 5
    # Who compares the two must know that their costs are of two kinds.
    (warning,) = document["warnings"]
    assert "1 of 2 configurations left the range" in warning


def test_named_costs_are_not_exchanged(tmp_path):
    document, by_budget = planned(tmp_path, STUDY.replace("COST", "calibrated"))
    assert "outside the calibrated range" in by_budget[8192]["failure"]
    assert by_budget[1024]["failure"] is None and document["warnings"] == []


@pytest.mark.parametrize("rate", [5, 20])
def test_runs_at_a_given_rate_fall_back_too(tmp_path, rate):
    """A prompt of 9,000 tokens takes more than the profile's steps, whatever the rate."""
    text = STUDY.replace("COST", "auto").replace("prompt: 256", "prompt: 9000")
    text = text.replace("[1024, 8192]", "[2048, 8192]").replace("p90: 2000", "p90: 200000")
    text += f"objective: {{kind: min_cost, rate: {rate}}}\nprices: {{h200: 2}}\n"
    path = tmp_path / "study.yaml"
    path.write_text(text, encoding="utf-8")
    main(["sim", "plan", str(path), "--quiet"])
    document = json.loads((tmp_path / "study-plan" / "plan.json").read_text(encoding="utf-8"))
    assert [one["failure"] for one in document["ranking"]] == [None, None]
    by_budget = {one["configuration"]["max_num_batched_tokens"]: one for one in document["ranking"]}
    assert kind(by_budget[8192]) == "roofline"
