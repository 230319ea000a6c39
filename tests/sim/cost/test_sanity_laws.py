"""Laws that every cost model keeps over many models and GPUs.

Faster memory is never slower, half the bytes are never slower, two GPUs are never over twice as
fast, and no step beats the data sheet.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
from sim_testing import rows_workload, run

from sim.cost.features import StepFeatures
from sim.cost.hosted import host_terms
from sim.cost.operator_tables import why_no_tables
from sim.cost.optable import OptableCost
from sim.cost.physics import Physics
from sim.cost.pipeline import Host, HostTerms
from sim.cost.profiles import find_profile
from sim.cost.roofline import RooflineCost
from sim.run.deployment import build, deployment_with
from sim.specs.hardware import HARDWARE
from sim.specs.models import MODELS, model_named

NAMES = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b",
         "llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b", "mistral-7b", "qwen2.5-7b",
         "qwen3-30b-a3b", "mixtral-8x7b")  # fmt: skip
TABLED = ("h200", "h100", "a100-80gb", "b200", "l40s", "rtxpro6000")
STEPS = {
    "one decode": StepFeatures(1, 1_000, (), 1),
    "32 decodes": StepFeatures(32, 32_000, (), 32),
    "256 decodes": StepFeatures(256, 256_000, (), 256),
    "a prompt": StepFeatures(0, 0, ((0, 1_000),), 1),
    "a long chunk": StepFeatures(0, 0, ((4_096, 4_096),), 0),
    "a mixed step": StepFeatures(16, 16_000, ((0, 300),), 17),
}
PROFILE = find_profile(MODELS["qwen3-8b"], HARDWARE["h200"], 1, True, "vllm 0.33")
ASYNC = {"kernel": {"async_scheduling": True}}
needs_tables = pytest.mark.skipif(
    find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core is not installed"
)


def roofline(model, sheet, tp=1):
    return RooflineCost(model, sheet, tp)


def optable(model, sheet, tp=1):
    return OptableCost(Physics(model, sheet, tp))


def times(cost):
    return {name: cost.step_time_ns(step) for name, step in STEPS.items()}


def never_slower(fast, slow, share=0.0):
    for name, time_ns in fast.items():
        assert time_ns <= slow[name] * (1 + share) + 1, name


def within_floor(cost):
    for name, step in STEPS.items():
        floor_ns = cost.physics.floor_ns(cost.physics.step_work(step))
        assert cost.step_time_ns(step) >= floor_ns, name


@pytest.mark.parametrize("gpu", HARDWARE)
@pytest.mark.parametrize("name", NAMES)
def test_the_roofline_keeps_the_laws(name, gpu):
    model, sheet = MODELS[name], HARDWARE[gpu]
    cost = roofline(model, sheet)
    within_floor(cost)
    faster = replace(sheet, memory_bytes_per_s=1.3 * sheet.memory_bytes_per_s)
    never_slower(times(roofline(model, faster)), times(cost))
    never_slower(times(roofline(model_named(name, kv_cache_dtype="fp8"), sheet)), times(cost))
    halved = {step: time_ns / 2 for step, time_ns in times(cost).items()}
    never_slower(halved, times(roofline(model, sheet, 2)))


@needs_tables
@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b", "llama-3.1-70b", "qwen3-30b-a3b"])
def test_the_operator_tables_keep_the_laws(name):
    model = MODELS[name]
    for gpu in TABLED:
        sheet = HARDWARE[gpu]
        cost = optable(model, sheet)
        within_floor(cost)
        if why_no_tables(model, sheet, 2) is None:
            halved = {step: time_ns / 2 for step, time_ns in times(cost).items()}
            never_slower(halved, times(optable(model, sheet, 2)))
    # The same chip with faster memory; what tables of two machines differ by beside, 5 %.
    slow, fast = (times(optable(model, HARDWARE[gpu])) for gpu in ("h100", "h200"))
    decodes = {step: time_ns for step, time_ns in fast.items() if "decode" in step}
    never_slower(decodes, slow, share=0.05)


@needs_tables
def test_a_stretch_of_decodes_is_the_sum_of_its_steps():
    cost = optable(MODELS["qwen3-8b"], HARDWARE["h200"])
    run = cost.decode_run_ns(8, 8_000, 300)
    single = [cost.step_time_ns(StepFeatures(8, 8_000 + 8 * step, (), 8)) for step in range(300)]
    assert run == single


@needs_tables
def test_what_has_no_tables_is_refused_by_name():
    for model, gpu, tp, words in (
        (MODELS["qwen3-8b"], "rtx4090", 1, "rtx4090"),
        (MODELS["qwen3-8b"], "l40s", 2, "all-reduce"),
        (model_named("qwen3-8b", kv_cache_dtype="fp8"), "h200", 1, "16 bit"),
    ):
        assert words in why_no_tables(model, HARDWARE[gpu], tp)


@needs_tables
@pytest.mark.parametrize("engine", ["vllm-0.25", "vllm-0.33"])
def test_a_host_beside_the_tables_only_adds_time(engine):
    given = {"model": "qwen3-8b", "hardware": "h100", "engine": engine}
    parts = build(deployment_with(given), 0)
    cost, device = parts.costs[0], optable(parts.model, parts.hardware)
    assert parts.trust.kind == cost.name == "optable"
    for name, step in STEPS.items():
        assert cost.step_time_ns(step) >= device.step_time_ns(step), name
    if engine == "vllm-0.25":
        steps = [StepFeatures(8, 8_000 + 8 * place, (), 8) for place in range(20)]
        assert cost.decode_run_ns(8, 8_000, 20) == [cost.step_time_ns(step) for step in steps]
    else:
        # A launch goes through the layers: half of them take half of it.
        deep, flat = (Host(host_terms(PROFILE, layers)) for layers in (36, 18))
        prompt = STEPS["a prompt"]
        launches = [host.launch_ns(prompt, 0) - host.prepare_ns(prompt) for host in (deep, flat)]
        assert launches[1] == pytest.approx(launches[0] / 2, rel=0.2)


def test_a_launch_blocks_the_host_and_the_device_ends_no_earlier():
    slow = HostTerms(graph_launch=50e6, eager_launch=50e6)
    rows = rows_workload((0, 100, 3), (0, 100, 3))
    plain, blocked = (run(rows, costs=[Device(host)], **ASYNC) for host in (None, slow))
    # The prompts' step ends with its launch; decode steps are as long as before.
    firsts = [min(one.result.ledger.first_token_ns) / 1e6 for one in (plain, blocked)]
    ends = [max(one.result.ledger.finish_ns) / 1e6 for one in (plain, blocked)]
    assert firsts == [10, 50]
    assert [end - first for end, first in zip(ends, firsts, strict=True)] == [20, 20]


def test_hand_over_and_client_are_delays_of_their_own():
    terms = HostTerms(hand_over=3e6, client=2e6)
    rows = rows_workload((0, 100, 3))
    plain, delayed = (run(rows, costs=[Device(host)], **ASYNC) for host in (None, terms))
    for column, later in (("first_scheduled_ns", 3), ("first_token_ns", 5), ("finish_ns", 5)):
        one, two = (getattr(each.result.ledger, column)[0] for each in (plain, delayed))
        assert two - one == later * 1_000_000


class Device:
    """Every step takes 10 ms on the device."""

    name = "made"

    def __init__(self, terms):
        if terms is not None:
            self.host = Host(terms)

    def step_time_ns(self, features):
        return 10_000_000

    def describe(self):
        return {"name": self.name}
