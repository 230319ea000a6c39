"""Asynchronous scheduling: a step is planned while the one before it runs."""

from dataclasses import replace

import pytest
from places import REPOSITORY
from sim_testing import MS, constant, deployment, ours, rows_workload, run, synthetic

from engine.core import ConfigError
from engine.steplog.api import StepLogReader
from engine.steplog.replay import replay
from sim.cluster.fleet import FleetSimulation, Member
from sim.cluster.prefill_decode import KvLink
from sim.cluster.router import make_router
from sim.run.deployment import build, deployment_with
from sim.run.run import RunPlan, run_plan

DATA = REPOSITORY / "sim" / "data"
ASYNC = {"kernel": {"async_scheduling": True}}


def firsts(finished):
    return [time / MS for time in finished.result.ledger.first_token_ns]


def ends(finished):
    return [time / MS for time in finished.result.ledger.finish_ns]


def test_a_request_that_comes_during_a_step_waits_for_one_step_more():
    rows = rows_workload((0, 100, 20), (25, 100, 2))
    # Steps take 10 ms. The step of 30 to 40 ms is planned at 20 ms, before the arrival.
    assert firsts(run(rows, costs=constant(10))) == [10, 40]
    late = run(rows, costs=constant(10), **ASYNC)
    assert firsts(late) == [10, 50] and ends(late) == [200, 60]


def test_an_idle_server_begins_at_once_and_again_after_a_pause():
    rows = rows_workload((5, 100, 2), (100, 100, 2))
    finished = run(rows, costs=constant(10), **ASYNC)
    assert firsts(finished) == [15, 110] and ends(finished) == [25, 120]
    assert finished.result.servers[0].num_steps == 4


def test_a_place_is_free_one_step_later():
    rows = rows_workload((0, 100, 3), (1, 100, 3), (2, 100, 3))
    assert ends(run(rows, costs=constant(10), max_num_seqs=1)) == [30, 60, 90]
    # Nothing is left for the step that was planned while the last one ran, so it takes no time.
    one = run(rows, costs=constant(10), max_num_seqs=1, **ASYNC)
    assert ends(one) == [30, 60, 90]
    two = rows_workload((0, 100, 3), (0, 100, 9), (1, 100, 3))
    assert ends(run(two, costs=constant(10), max_num_seqs=2)) == [30, 90, 60]
    assert ends(run(two, costs=constant(10), max_num_seqs=2, **ASYNC)) == [30, 90, 70]


@pytest.mark.parametrize(
    "changes",
    [{"num_kv_blocks": 400, "rate": 40.0}, {"max_num_seqs": 4}, {"replicas": 2},
     {"name": "sessions"}],
    ids=["preemptions", "few", "replicas", "sessions"],
)  # fmt: skip
def test_the_log_replays_without_a_difference(tmp_path, changes):
    name, rate = changes.pop("name", "poisson"), changes.pop("rate", None)
    workload = synthetic(name, num_requests=60, rate=rate)
    path = tmp_path / "steps.jsonl"
    finished = run(
        workload, log_path=path, cost="roofline", router="least-tokens",
        async_scheduling=True, **changes,
    )  # fmt: skip
    assert finished.summary.completed == 60
    result = replay(StepLogReader(path))
    assert result.difference is None and result.num_requests == 60 and result.num_live == 0
    mine = ours(finished)
    assert mine["physical_floor"]["violations"] == 0
    assert mine["provenance"]["deployment"]["async_scheduling"] is True
    again = run(workload, router="least-tokens", async_scheduling=True, **changes)
    assert again.summary == finished.summary


def test_both_kinds_of_scheduling_make_the_same_tokens_in_nearly_the_same_time():
    workload = synthetic(num_requests=100, rate=8.0)
    one, other = run(workload), run(workload, async_scheduling=True)
    assert list(one.result.ledger.output_tokens) == list(other.result.ledger.output_tokens)
    # Each admission shifts by about one decode step, which is all.
    step_ms = one.summary.itl.median
    wait_ms = other.summary.ttft.mean - one.summary.ttft.mean
    assert 0 < wait_ms < 2 * step_ms
    assert other.summary.duration == pytest.approx(one.summary.duration, rel=0.01)
    assert "async_scheduling" not in ours(one)["provenance"]["deployment"]


def test_a_profile_is_used_for_its_own_kind_of_scheduling_only():
    known = {"model": "qwen3-8b", "hardware": "h200"}
    for overlapped, engine in ((False, "vllm 0.25.1"), (True, "vllm 0.33.0")):
        parts = build(deployment(**known, async_scheduling=overlapped, cost="auto"), 0)
        assert parts.costs[0].describe()["engine"] == engine
    named = f"calibrated:{DATA / 'qwen3-8b_h200.json'}"
    with pytest.raises(ConfigError, match="synchronous scheduling"):
        build(deployment(**known, async_scheduling=True, cost=named), 0)
    named = f"calibrated:{DATA / 'qwen3-8b_h200_vllm-0.33.json'}"
    with pytest.raises(ConfigError, match="asynchronous scheduling"):
        build(deployment(**known, cost=named), 0)


def test_a_member_of_a_fleet_is_the_server_that_a_run_has():
    given = {"model": "qwen3-8b", "hardware": "h200", "engine": "vllm-0.33"}
    plan = RunPlan(rows_workload((0, 300, 20), (25, 900, 9)), deployment_with(given))
    alone = run_plan(plan, build(plan.deployment, 0)).result
    parts = build(plan.deployment, 0)
    member = Member(parts.kernel, parts.costs[0], parts.physics)
    routers = [make_router("round-robin") for _ in range(2)]
    fleet = FleetSimulation(plan.workload, [member], *routers, KvLink()).run()
    assert list(fleet.ledger.first_token_ns) == list(alone.ledger.first_token_ns)
    assert list(fleet.ledger.finish_ns) == list(alone.ledger.finish_ns)
    apart = [replace(member, role=role) for role in ("prefill", "decode")]
    with pytest.raises(ConfigError, match="async_scheduling"):
        FleetSimulation(plan.workload, apart, *routers, KvLink())


def test_a_log_with_a_host_replays_without_a_difference(tmp_path):
    path = tmp_path / "steps.jsonl"
    finished = run(
        synthetic(num_requests=60, rate=12.0), log_path=path, model="qwen3-8b", hardware="h200",
        async_scheduling=True, cost="auto",
    )  # fmt: skip
    assert finished.parts.costs[0].host.terms.eager_launch > 0
    result = replay(StepLogReader(path))
    assert result.difference is None and result.num_requests == 60 and result.num_live == 0
    # The client sees a request's end after the device has made its last token.
    assert max(finished.result.ledger.finish_ns) > finished.result.servers[0].last_end_ns
