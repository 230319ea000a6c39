"""Laws and relations of the simulator on small timed runs, and the hand-checked anomaly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.core.config import KernelConfig
from properties.timed_runs import simulated
from properties.timed_runs.anomalies import measure
from properties.timed_runs.relations import BELIEFS, SKIP, TRUE_RELATIONS, Relation, without_cache
from properties.timed_runs.timed import Case, Job, random_case, simulate

POLICIES = ("mixed", "prefill_first")
TWO_JOBS = (Job("a", 0, (1, 2, 3, 4), 2), Job("b", 0, (5, 6, 7, 8, 9), 2))


@pytest.mark.parametrize("policy", POLICIES)
def test_runs_keep_the_laws_of_the_simulator(policy: str) -> None:
    for seed in range(60):
        case = random_case(seed, policy)
        run = simulate(case)
        for check in simulated.RUN_CHECKS:
            check(run)
        for case_check in simulated.CASE_CHECKS:
            case_check(case)


@pytest.mark.parametrize("policy", POLICIES)
def test_fast_forward_equals_step_by_step(policy: str) -> None:
    for seed in range(60):
        case = random_case(seed, policy)
        assert simulate(case).steps == simulate(case, step_by_step=True).steps


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("relation", TRUE_RELATIONS, ids=lambda relation: str(relation.name))
def test_relation_holds(relation: Relation, policy: str) -> None:
    said_something = 0
    for seed in range(60):
        told = relation.check(random_case(seed, policy))
        said_something += told != SKIP
        assert told in (None, SKIP), f"seed {seed}: {told}"
    assert said_something >= 20


def test_relations_can_fail() -> None:
    """Two of the beliefs, asked in the form of a relation, are refuted by the same cases."""
    measured = measure("prefill_first", 0, 60)
    assert measured.worse["one more KV block never raises (cache off)", "makespan"] > 0
    assert measured.worse["removing a request never raises", "some e2e"] > 0
    assert sum(measured.broken.values()) == 0


@pytest.mark.parametrize(
    ("blocks", "ends", "latencies"),
    [(4, [10, 17, 28, 35], (17, 35)), (5, [10, 21, 28, 40], (28, 40))],
)
def test_one_more_block_costs_time_in_the_hand_checked_example(
    blocks: int, ends: list[int], latencies: tuple[int, int]
) -> None:
    config = KernelConfig(
        num_blocks=blocks,
        max_model_len=64,
        block_size=2,
        max_num_seqs=3,
        max_num_batched_tokens=8,
        policy="prefill_first",
        enable_prefix_caching=False,
    )
    run = simulate(Case(TWO_JOBS, config))
    assert [step.end for step in run.steps] == ends
    assert (run.e2e["a"], run.e2e["b"]) == latencies
    assert run.preemptions == (blocks == 5)


def test_one_more_block_costs_time_under_mixed_too() -> None:
    config = KernelConfig(
        num_blocks=4,
        max_model_len=64,
        block_size=2,
        max_num_seqs=3,
        max_num_batched_tokens=8,
        enable_prefix_caching=False,
    )
    case = Case(TWO_JOBS, config)
    more = replace(case, config=replace(config, num_blocks=5))
    assert (simulate(case).makespan, simulate(more).makespan) == (35, 40)


def test_beliefs_have_distinct_names() -> None:
    names = [(belief.text, metric) for belief in BELIEFS for metric in belief.metrics]
    assert len(set(names)) == len(names)


def test_without_cache_switches_only_the_cache_off() -> None:
    case = random_case(1, "mixed")
    cold = without_cache(case)
    assert not cold.config.enable_prefix_caching
    assert replace(cold.config, enable_prefix_caching=True) == case.config
