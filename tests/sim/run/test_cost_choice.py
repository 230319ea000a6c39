"""`--cost auto` takes the best model that does, says why no better one, and goes on with a next."""

from __future__ import annotations

import json
import pickle

import pytest

from engine.cli import main
from sim.cost.calibrated import OutOfRange
from sim.cost.trust import GIVEN_TRUST, ROOFLINE_TRUST
from sim.run.cost_choice import CANDIDATES, Asked, Candidate, choose
from sim.run.deployment import Deployment, build
from sim.specs.hardware import hardware_named
from sim.specs.models import model_named

RUN = ["sim", "run", "--workload", "poisson", "--model", "qwen3-8b", "--hardware", "h200"]
LONG = ["--num-requests", "40", "--rate", "1000", "--prompt-len", "30000", "--output-len", "40"]


def asked(hardware="h200", tp=1, **rest):
    facts = {"expert_parallel": False, "async_scheduling": False, **rest}
    return Asked(model_named("qwen3-8b"), hardware_named(hardware), tp, **facts)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"hardware": "h100"}, "scheduling of qwen3-8b on h100 at tp=1"),
        ({"tp": 2}, "at tp=2"),
        ({"async_scheduling": True, "hardware": "h100"}, "with asynchronous scheduling"),
        ({"async_scheduling": True, "engine": "vllm 0.25"}, "of vllm 0.25 with asynchronous"),
        ({"expert_parallel": True}, "know no experts"),
    ],
)
def test_the_reason_against_a_better_model_is_named(what, reason):
    kind, passed_over = choose(asked(**what))
    assert kind != "calibrated" and reason in passed_over["calibrated"]


def test_the_best_model_is_taken_where_nothing_speaks_against_it():
    for overlapped in (False, True):
        assert choose(asked(async_scheduling=overlapped)) == ("calibrated", {})
    kind, passed_over = choose(asked(), [("calibrated", "it left its range")])
    assert kind != "calibrated" and passed_over["calibrated"] == "it left its range"


def test_a_further_candidate_is_one_more_row():
    table = Candidate("roofline", lambda what: "not today" if what.tp == 1 else None)
    order = (table, *CANDIDATES)
    assert choose(asked(), (), order)[0] == "calibrated"
    assert choose(asked(tp=2), (), order)[1] == {}


def test_every_run_says_how_far_off_its_cost_model_was_measured_to_be():
    assert GIVEN_TRUST in build(Deployment(cost="constant:5"), 0).trust.error_class
    assert build(Deployment(cost="roofline"), 0).trust.measured == ROOFLINE_TRUST
    for overlapped in (False, True):
        trust = build(Deployment(hardware="h200", async_scheduling=overlapped), 0).trust
        assert trust.kind == trust.measured.cost == "calibrated"
        assert trust.measured.low_percent < 0 < trust.measured.high_percent


def test_a_run_outside_the_calibrated_range_goes_on_with_the_roofline(tmp_path, capsys):
    out = tmp_path / "out"
    assert main([*RUN, *LONG, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "roofline cost" in printed and "steps outside its range" in printed
    assert ROOFLINE_TRUST.text in printed
    summary = json.loads((out / "summary.json").read_text())
    trust = summary["sim"]["trust"]
    assert trust["kind"] == summary["sim"]["provenance"]["cost"]["name"] == "roofline"
    assert "outside its range" in trust["passed_over"]["calibrated"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    # The same figures as those of a run that was asked for the roofline.
    assert main([*RUN, *LONG, "--cost", "roofline", "--json"]) == 0
    asked_for = json.loads(capsys.readouterr().out)
    for document in (summary, asked_for):
        del document["sim"]["trust"]
    assert summary == asked_for


def test_intervals_are_those_of_the_model_that_is_used(capsys):
    assert main([*RUN, *LONG, "--intervals", "5", "--json"]) == 0
    sim = json.loads(capsys.readouterr().out)["sim"]
    assert sim["intervals"]["resampled"] == ["seed"] and sim["trust"]["kind"] == "roofline"


def test_a_model_that_was_asked_for_by_name_is_still_refused(tmp_path, capsys):
    assert main([*RUN, *LONG, "--cost", "calibrated", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "lie outside the range" in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_error_survives_simpy_and_another_process():
    error = OutOfRange("text", "calibrated", "5 %")
    for copy in (type(error)(*error.args), pickle.loads(pickle.dumps(error))):
        assert (str(copy), copy.kind, copy.reason) == ("text", "calibrated", "5 %")


def test_calibrated_profiles_know_no_experts(capsys):
    words = ["--model", "qwen3-30b-a3b", "--cost", "calibrated", "--expert-parallel"]
    assert main(["sim", "run", "--workload", "poisson", *words]) == 2
    assert "expert_parallel" in capsys.readouterr().err
