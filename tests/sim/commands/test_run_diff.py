"""`lockstep sim diff`: parts of the latency add up, and each change has its cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.cli import main
from sim.commands.diff import CAUSES, compare_runs, read_run

COMMON = ["--hardware", "h200", "--model", "qwen3-0.6b", "--no-perfetto"]


def simulate(out: Path, *options: str) -> Path:
    assert main(["sim", "run", "--out", str(out), *COMMON, *options]) == 0
    return out


@pytest.fixture(scope="module")
def poisson_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    workload = ("--workload", "poisson", "--num-requests", "60", "--rate", "30")
    return {
        "plain": simulate(folder / "plain", *workload, "--cost", "roofline"),
        "few": simulate(folder / "few", *workload, "--cost", "roofline", "--max-num-seqs", "2"),
        "tight": simulate(
            folder / "tight", *workload, "--cost", "roofline", "--num-kv-blocks", "220"
        ),
    }


def test_a_run_does_not_differ_from_itself(poisson_runs):
    run = read_run(poisson_runs["plain"])
    changes = compare_runs(run, run)
    assert len(changes) == 60
    assert not any(any(change.causes_ns.values()) for change in changes)


@pytest.mark.parametrize("other", ["few", "tight"])
def test_causes_add_up_to_the_change_exactly(poisson_runs, other):
    changes = compare_runs(read_run(poisson_runs["plain"]), read_run(poisson_runs[other]))
    for change in changes:
        assert set(change.causes_ns) == set(CAUSES)
        assert sum(change.causes_ns.values()) == change.e2e_ns
    assert sum(change.e2e_ns for change in changes) != 0


def test_fewer_seats_show_as_waiting_and_smaller_batches(poisson_runs):
    changes = compare_runs(read_run(poisson_runs["plain"]), read_run(poisson_runs["few"]))
    totals = {cause: sum(change.causes_ns[cause] for change in changes) for cause in CAUSES}
    assert totals["queue"] > 0 > totals["batch"]
    assert totals["queue"] == max(totals.values())
    for change in changes:
        assert change.batch_b <= 2


def test_a_small_pool_shows_as_preemption(poisson_runs):
    changes = compare_runs(read_run(poisson_runs["plain"]), read_run(poisson_runs["tight"]))
    assert sum(change.causes_ns["preempted"] for change in changes) > 0


def test_lost_prefix_hits_are_named(tmp_path):
    sessions = ("--workload", "sessions", "--num-requests", "40", "--cost", "roofline")
    a = simulate(tmp_path / "a", *sessions)
    b = simulate(tmp_path / "b", *sessions, "--no-prefix-caching")
    changes = compare_runs(read_run(a), read_run(b))
    assert sum(change.causes_ns["hits"] for change in changes) > 0
    assert all(not change.causes_ns["prefill"] for change in changes if change.causes_ns["hits"])


def test_totals_and_requests_are_printed_and_given_as_json(poisson_runs, capsys):
    pair = [str(poisson_runs["plain"]), str(poisson_runs["few"])]
    assert main(["sim", "diff", *pair, "--top", "2"]) == 0
    text = capsys.readouterr().out
    assert "60 requests in both runs" in text and "waited behind others" in text
    assert main(["sim", "diff", *pair, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    causes = sum(cause["total_ms"] for cause in document["causes"].values())
    assert causes == pytest.approx(document["total_e2el_ms"])
    assert document["gained"] + document["lost"] + document["same"] == 60
    assert len(document["requests"]) == 60


def test_other_requests_or_no_run_at_all_are_refused(poisson_runs, tmp_path, capsys):
    other = simulate(
        tmp_path / "other", "--workload", "poisson", "--num-requests", "60", "--seed", "5"
    )
    capsys.readouterr()
    assert main(["sim", "diff", str(poisson_runs["plain"]), str(other)]) == 2
    assert "not the same workload" in capsys.readouterr().err
    assert main(["sim", "diff", str(poisson_runs["plain"]), str(tmp_path)]) == 2
    assert "holds no requests.csv" in capsys.readouterr().err
