"""Every law has a sentence, a check that exists, and a planted defect that it notices."""

from __future__ import annotations

import pytest

from properties.defects import MUTANTS, Mutant
from properties.defects.facade import FACADE_DEFECTS
from properties.defects.growth import LEAKS
from properties.defects.planting import Planted
from properties.laws import KERNEL_LAWS, all_laws, caught, resolve
from properties.laws.documents import DOCS, laws_document
from properties.laws.simulator import SIMULATOR_LAWS
from properties.search import probes
from properties.search.run import run_workload
from properties.search.workloads import random_workload
from properties.timed_runs.spoiled import SPOILED

STATED = (
    [f"B{i}" for i in range(1, 12)]
    + [f"K{i}" for i in range(1, 12)]
    + [f"W{i}" for i in range(1, 6)]
    + ["V1"]
    + [f"S{i}" for i in range(1, 15)]
    + [f"A{i}" for i in range(1, 5)]
    + [f"T{i}" for i in range(1, 6)]
    + [f"L{i}" for i in range(1, 12)]
    + ["C1", "C2"]
    + [f"E{i}" for i in range(1, 6)]
    + ["H1", "H2", "H3"]
    + [f"M{i}" for i in range(1, 13)]
)


def test_registry_holds_every_law_once() -> None:
    assert [law.id for law in all_laws()] == STATED


def test_every_law_names_checks_that_exist_and_something_that_breaks_it() -> None:
    for law in all_laws():
        assert law.checks, law.id
        for check in law.checks:
            assert callable(resolve(check)), check
        assert law.mutants or law.canary, f"{law.id} has no test that can fail"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.law}-{mutant.name}")
def test_planted_defect_is_caught_by_its_own_law(mutant: Mutant) -> None:
    found = caught(mutant)
    assert found is not None, f"{mutant.law} does not notice: {mutant.what}"
    assert found[1].law == mutant.law


@pytest.mark.parametrize(
    "law", [law for law in KERNEL_LAWS if law.canary], ids=lambda law: str(law.id)
)
def test_probe_notices_its_canary(law: object) -> None:
    alarm = law.canary()  # type: ignore[attr-defined]
    assert alarm is not None
    assert alarm.law == law.id  # type: ignore[attr-defined]


@pytest.mark.parametrize("law", SIMULATOR_LAWS, ids=lambda law: str(law.id))
def test_simulator_law_notices_its_canary(law: object) -> None:
    alarm = law.canary()  # type: ignore[attr-defined]
    assert alarm is not None
    assert alarm.law == law.id  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "probe",
    [
        probes.double_free,
        probes.round_trip,
        probes.hash_chain,
        probes.hash_across_processes,
        probes.determinism,
        probes.impossible_configs,
        probes.chunk_independence,
        probes.output_independence,
    ],
)
def test_kernel_passes_the_probe(probe: object) -> None:
    probe()  # type: ignore[operator]


def test_assembled_kernel_without_a_defect_keeps_all_laws() -> None:
    """Else the planted defects could be caught for the way they are planted."""
    for seed in range(150):
        run_workload(random_workload(seed), Planted)  # type: ignore[arg-type]


def test_laws_document_is_up_to_date() -> None:
    written = (DOCS / "laws.md").read_text()
    assert written == laws_document(), "run: lockstep verify laws --write"


def test_mutants_document_lists_every_planted_defect() -> None:
    written = (DOCS / "mutants.md").read_text()
    for mutant in MUTANTS:
        assert f"| {mutant.name} | {mutant.what} | {mutant.source} |" in written
    for name, what in [
        *[(leak.__name__, (leak.__doc__ or "").strip()) for leak in LEAKS],
        *[(spoiled.name, spoiled.what) for spoiled in SPOILED],
        *[(defect.name, defect.what) for defect in FACADE_DEFECTS],
    ]:
        assert f"| {name} | {what} |" in written
    assert "not caught" not in written
