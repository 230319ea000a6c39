"""With the policy `priority` the important come first, and a summary says by how much."""

import random
from dataclasses import replace

import pytest
from sim_testing import constant, rows_workload, run

from engine.steplog.replay import replay
from engine.steplog.vllm_recording import open_log
from sim.report.run_report import latency_rows


def crowded(priorities=True):
    rng = random.Random(3)
    rows = [(0.001 * place, rng.randint(20, 200), rng.randint(1, 30)) for place in range(120)]
    workload = rows_workload(*rows)
    ranks = tuple(rng.choice((0, 5)) for _ in rows) if priorities else None
    return replace(workload, priorities=ranks)


def test_latencies_are_given_by_priority_and_add_up_to_all(tmp_path):
    log = tmp_path / "steps.jsonl"
    settings = dict(policy="priority", max_num_seqs=4, num_kv_blocks=40, costs=constant(2))
    finished = run(crowded(), log_path=log, **settings)
    first, last = finished.summary.sim.priorities
    assert (first.priority, last.priority) == (0, 5)
    assert first.completed + last.completed == finished.summary.completed == 120
    mean = (first.ttft.mean * first.completed + last.ttft.mean * last.completed) / 120
    assert mean == pytest.approx(finished.summary.ttft.mean)
    assert first.ttft.mean < last.ttft.mean / 1.5
    document = finished.summary.to_json()["sim"]["priorities"]
    assert [one["priority"] for one in document] == [0, 5]
    assert document[0]["mean_ttft_ms"] == first.ttft.mean
    assert [row[0] for row in latency_rows(finished.summary)][-1] == "TTFT, priority 5"
    assert replay(open_log(log)).difference is None  # the log keeps the priorities


def test_without_the_policy_classes_differ_by_chance_only_and_without_priorities_there_are_none():
    settings = dict(max_num_seqs=4, num_kv_blocks=40, costs=constant(2))
    first, last = run(crowded(), **settings).summary.sim.priorities
    assert 0.7 < first.ttft.mean / last.ttft.mean < 1.4
    plain = run(crowded(priorities=False), **settings).summary
    assert plain.sim.priorities == () and "priorities" not in plain.to_json()["sim"]
