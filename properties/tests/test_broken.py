"""Whatever judges a scheduler goes red for one that raises, returns nothing or never finishes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from engine.core.config import KernelConfig
from engine.core.errors import KernelBug
from engine.core.scheduler import Scheduler
from properties.conformance import check_adapter
from properties.conformance.kernel_adapter import KernelAdapter
from properties.defects.broken import BROKEN
from properties.follower.view import LawBroken
from properties.laws import KERNEL_LAWS, Law
from properties.search import probes
from properties.search.exhaustive import enumerate_states
from properties.search.machine import SchedulerMachine
from properties.search.run import run_workload
from properties.search.scopes import SCOPES, small_config
from properties.search.search import SEED_STRIDE, search, workload_of_seed
from properties.search.workloads import random_workload
from properties.timed_runs import simulated
from properties.timed_runs.relations import SKIP, TRUE_RELATIONS, Relation
from properties.timed_runs.timed import random_case, simulate

POLICIES = ("mixed", "prefill_first")
PROBES = (
    probes.double_free,
    probes.round_trip,
    probes.determinism,
    probes.chunk_independence,
    probes.output_independence,
)
# These judge hashing and configurations, and take no scheduler.
NO_SCHEDULER = {"hash_chain", "hash_across_processes", "impossible_configs"}
Broken = type[Scheduler]
broken = pytest.mark.parametrize("factory", BROKEN, ids=lambda factory: str(factory.__name__))


@broken
@pytest.mark.parametrize("law", KERNEL_LAWS, ids=lambda law: str(law.id))
def test_a_run_that_asks_for_one_law_goes_red(law: Law, factory: Broken) -> None:
    for policy in POLICIES:
        with pytest.raises(LawBroken):
            run_workload(random_workload(1, policy), factory, only=frozenset({law.id}))  # type: ignore[arg-type]


@broken
def test_a_run_that_asks_for_all_laws_goes_red(factory: Broken) -> None:
    for seed in range(20):
        with pytest.raises(LawBroken):
            run_workload(random_workload(seed), factory, thorough=bool(seed % 2))  # type: ignore[arg-type]


@broken
@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: str(probe.__name__))
def test_a_probe_goes_red(probe: Callable[..., None], factory: Broken) -> None:
    with pytest.raises((LawBroken, RuntimeError, AssertionError)):
        probe(factory)


def test_every_probe_of_a_law_is_tried() -> None:
    checks = {check.partition(":") for law in KERNEL_LAWS for check in law.checks}
    named = {name for module, _, name in checks if module == "properties.search.probes"}
    assert named - NO_SCHEDULER == {probe.__name__ for probe in PROBES}


@broken
@pytest.mark.parametrize("relation", TRUE_RELATIONS, ids=lambda relation: str(relation.name))
def test_a_relation_between_timed_runs_goes_red(relation: Relation, factory: Broken) -> None:
    with mock.patch("sim.cluster.server.Scheduler", factory):
        for seed in range(40):
            try:
                told = relation.check(random_case(seed, "mixed"))
            except (LawBroken, KernelBug, RuntimeError, AssertionError, KeyError):
                return
            if told is not None and told != SKIP:
                return
            assert told == SKIP, f"seed {seed} is called right"
    raise AssertionError("nothing was said about 40 cases")


@broken
@pytest.mark.parametrize("check", simulated.CASE_CHECKS, ids=lambda check: str(check.__name__))
def test_a_law_of_the_simulator_goes_red(check: Callable[..., None], factory: Broken) -> None:
    with (
        mock.patch("sim.cluster.server.Scheduler", factory),
        pytest.raises((LawBroken, RuntimeError, AssertionError)),
    ):
        for seed in range(40):
            check(random_case(seed, "mixed"))


@broken
def test_no_timed_run_of_it_exists_that_a_law_could_judge(factory: Broken) -> None:
    with (
        mock.patch("sim.cluster.server.Scheduler", factory),
        pytest.raises((LawBroken, RuntimeError, AssertionError)),
    ):
        simulate(random_case(0, "mixed"))


@broken
def test_the_search_goes_red_in_every_workload(factory: Broken) -> None:
    target = f"{factory.__module__}:{factory.__name__}"
    found = search(1, workloads=40, target=target, max_failures=1000)
    seeds = range(SEED_STRIDE, SEED_STRIDE + 40)
    stepping = [seed for seed in seeds if run_workload(workload_of_seed(seed)).ledger.steps]
    assert len(stepping) > 35
    assert {failure[0] for failure in found.failures} == {*stepping}


@broken
def test_the_conformance_kit_goes_red(factory: Broken) -> None:
    adapter = type("Adapter", (KernelAdapter,), {"scheduler_class": factory})
    report = check_adapter(adapter, workloads=20)
    assert report.findings
    assert not report.passed


@broken
def test_the_state_machine_goes_red(factory: Broken, tmp_path: Path) -> None:
    machine = type("Machine", (SchedulerMachine,), {"factory": factory, "failure_folder": tmp_path})
    with pytest.raises(LawBroken):
        run_state_machine_as_test(
            machine, settings=settings(max_examples=10, phases=(Phase.generate,))
        )


@broken
def test_the_enumeration_goes_red(factory: Broken) -> None:
    def build(config: KernelConfig) -> Scheduler:
        return factory(config)

    with pytest.raises((LawBroken, RuntimeError, AssertionError)):
        enumerate_states(small_config("mixed"), SCOPES["3x6"], build)  # type: ignore[arg-type]
