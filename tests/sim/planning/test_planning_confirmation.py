"""What happens to a capacity that long runs contradict; verdicts are made up, nothing is run."""

from __future__ import annotations

import pytest

from engine.cli import main
from sim.planning import confirm
from sim.planning.interleave import Failure
from sim.planning.parse import read_study
from sim.planning.plan_files import answer
from sim.planning.planner import Planner
from sim.planning.sampling import load_source
from sim.planning.trial import TrialResult

STUDY = """
workload: {generator: poisson, prompt: 64, output: 16}
slo: {ttft_ms: {p90: 100}}
objective: {kind: max_rate}
space: {cost: "constant:5", max_num_seqs: [4, 8], hardware: h200, model: qwen3-0.6b}
search: {requests: 200, seeds: 2, max_seeds: 2, keep: 1, tolerance: 0.05, verify_seeds: 1,
  verify_factor: 2}
"""


class MadeUp:
    """A driver whose runs meet the SLO up to `capacity(seats, seed, is_long)`."""

    def __init__(self, capacity):
        self.capacity = capacity

    def run(self, searches):
        return [self._answer(search) for _, search in searches]

    def _answer(self, search):
        results = None
        try:
            while True:
                wanted = next(search) if results is None else search.send(results)
                results = [self._result(trial) for trial in wanted]
        except StopIteration as stop:
            return stop.value

    def _result(self, trial):
        common = (trial.rate, trial.seed, trial.num_requests)
        if trial.rate is None:
            return TrialResult(*common, throughput=100.0)
        seats = trial.candidate.groups[0].deployment.max_num_seqs
        capacity = self.capacity(seats, trial.seed, trial.num_requests > 200)
        met = trial.rate <= capacity
        return TrialResult(
            *common,
            met=met,
            binding="p90 ttft",
            worst=trial.rate / capacity,
            good_share=float(met),
            throughput=trial.rate,
            output_tokens_per_s=1.0,
        )


def planned(tmp_path, capacity):
    path = tmp_path / "study.yaml"
    path.write_text(STUDY, encoding="utf-8")
    study = read_study(path)
    planner = Planner(study, load_source(study.workload), MadeUp(capacity), lambda text: None)
    return planner.plan()


def test_a_contradicted_capacity_gives_way_to_one_that_holds(tmp_path):
    """Eight seats seem to serve 100 in short runs and serve 40 in long ones; four serve 60."""
    plan = planned(
        tmp_path, lambda seats, seed, is_long: 60 if seats == 4 else 40 if is_long else 100
    )
    assert plan.best.candidate.name == "max_num_seqs=4" and plan.doubt is None
    assert plan.best.capacity == pytest.approx(60, rel=0.03)
    assert "sustains" in answer(plan)
    loser = plan.entries[1]
    assert loser.capacity == pytest.approx(40, rel=0.03)
    assert loser.searched == pytest.approx(100, rel=0.03)
    assert any("long runs contradicted" in note for note in loser.notes)


def test_a_contradicted_capacity_that_is_still_the_best_is_sought_anew_and_confirmed(tmp_path):
    plan = planned(
        tmp_path, lambda seats, seed, is_long: 10 if seats == 4 else 40 if is_long else 100
    )
    assert plan.best.capacity == pytest.approx(40, rel=0.03) and plan.doubt is None
    assert "short runs 1" in answer(plan) or "short runs 9" in answer(plan)


def test_a_capacity_that_no_long_runs_agree_on_is_not_called_sustained(tmp_path):
    """Each group of long runs has another capacity, so that each contradicts the one before."""
    plan = planned(
        tmp_path,
        lambda seats, seed, is_long: 1 if seats == 4 else 100 if not is_long else 40 - seed / 30,
    )
    assert plan.best.is_checked and plan.doubt is not None
    text = answer(plan)
    assert "sustain" not in text and text.startswith("not confirmed: max_num_seqs=8")


def test_a_failure_of_the_long_search_leaves_the_doubt(tmp_path, monkeypatch):
    def capacity(seats, seed, is_long):
        return 1 if seats == 4 else 40 if is_long else 100

    whole = MadeUp.run

    def failing(self, searches):
        longs = [search.gi_frame.f_locals.get("seed", 0) >= 600 for _, search in searches]
        answers = whole(self, [one for one, long in zip(searches, longs, strict=True) if not long])
        return [Failure("too short") if long else answers.pop(0) for long in longs]

    monkeypatch.setattr(MadeUp, "run", failing)
    plan = planned(tmp_path, capacity)
    assert plan.doubt is not None and "contradict" in plan.doubt
    assert any("no capacity by long runs: too short" in note for note in plan.best.notes)


def test_what_is_not_confirmed_ends_with_exit_code_3_and_one_line(tmp_path, capsys, monkeypatch):
    path = tmp_path / "study.yaml"
    path.write_text(STUDY.replace("[4, 8]", "4"), encoding="utf-8")
    # Runs at four times the capacity cannot meet the SLO.
    monkeypatch.setattr(confirm, "BELOW", 4.0)
    monkeypatch.setattr(confirm, "ABOVE", 5.0)
    assert main(["sim", "plan", str(path), "--quiet"]) == 3
    seen = capsys.readouterr()
    assert seen.err.startswith("lockstep: not confirmed: ") and seen.err.count("\n") == 1
    assert "sustain" not in seen.out + seen.err
