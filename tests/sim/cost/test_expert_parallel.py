"""Replicas that share the experts of a mixture."""

import pytest
from sim_testing import deployment, ours, run, synthetic

from sim.cost.expert_parallel import ExpertParallelCost, expert_parallel_costs
from sim.cost.features import RunCostModel, StepFeatures
from sim.cost.roofline import RooflineCost, RooflineOptions
from sim.run.deployment import build
from sim.specs.hardware import hardware_named
from sim.specs.models import model_named

DECODE = StepFeatures(16, 16 * 800, (), 16)
PREFILL = StepFeatures(0, 0, ((0, 1024),), 1)
MIXTURE = {
    "model": "qwen3-30b-a3b", "hardware": "h100", "replicas": 2, "expert_parallel": True,
    "num_kv_blocks": 20_000,
}  # fmt: skip


def group(num_replicas, **options):
    sheet, shape = hardware_named("h100"), model_named("qwen3-30b-a3b")
    roofline = RooflineCost(shape, sheet, 1, RooflineOptions(**options), num_replicas)
    return expert_parallel_costs(roofline, num_replicas)


def test_a_decode_step_beside_a_prefill_lasts_as_long_as_it():
    first, second = group(2)
    alone_ns = first.step_time_ns(DECODE)
    prefill_ns = second.step_time_ns(PREFILL)
    beside_ns = first.step_time_ns(DECODE)
    assert alone_ns < prefill_ns == beside_ns
    # The prefill is over: both decode, and the experts have the tokens of both.
    second.step_time_ns(DECODE)
    both_ns = first.step_time_ns(DECODE)
    assert alone_ns < both_ns < beside_ns


def test_the_experts_of_two_replicas_read_half_and_get_the_tokens_of_both():
    options = {"host_step_ns": 0, "link_latency_ns": 0, "link_efficiency": 1.0}
    first, second = group(2, **options)
    first.step_time_ns(DECODE)
    together_ns = second.step_time_ns(DECODE)
    whole = RooflineCost(
        model_named("qwen3-30b-a3b"), hardware_named("h100"), 1, RooflineOptions(**options)
    )
    exchange_ns = 2 * 48 * 2048 * 2 * 16 / 450
    expected_ns = whole.time_ns(DECODE, whole.experts_ns(32) / 2) + exchange_ns
    assert together_ns == pytest.approx(expected_ns, abs=2)


def test_a_replica_alone_has_nothing_to_exchange():
    (alone,) = group(1)
    plain = RooflineCost(model_named("qwen3-30b-a3b"), hardware_named("h100"))
    assert alone.step_time_ns(DECODE) == plain.step_time_ns(DECODE)


def test_a_deployment_spreads_the_experts_and_keeps_within_physics():
    parts = build(deployment(**MIXTURE), 0)
    assert all(isinstance(cost, ExpertParallelCost) for cost in parts.costs)
    assert not any(isinstance(cost, RunCostModel) for cost in parts.costs)
    assert parts.physics.expert_ranks == 2
    finished = run(synthetic(num_requests=40, rate=20.0), **MIXTURE)
    mine = ours(finished)
    assert mine["physical_floor"]["checked"] and mine["physical_floor"]["violations"] == 0
    assert mine["provenance"]["cost"]["expert_parallel"] == 2
    assert mine["provenance"]["deployment"]["expert_parallel"] is True
    assert finished.summary.completed == 40
    again = run(synthetic(num_requests=40, rate=20.0), **MIXTURE)
    assert again.summary == finished.summary


def test_replicas_with_experts_of_their_own_do_not_wait_for_each_other():
    apart = {**MIXTURE, "expert_parallel": False}
    assert build(deployment(**apart), 0).physics.expert_ranks == 1
    finished = run(synthetic(num_requests=40, rate=20.0), **apart)
    assert "expert_parallel" not in ours(finished)["provenance"]["deployment"]
    assert ours(finished)["physical_floor"]["violations"] == 0
