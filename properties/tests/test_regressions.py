"""Every kernel defect that a search found, as the shrunk operation list that showed it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from properties.search.failures import workload_of
from properties.search.run import run_workload

FILES = sorted((Path(__file__).parent / "regressions").glob("*.json"))


def test_regressions_are_there() -> None:
    assert len(FILES) >= 6


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.stem))
def test_kernel_keeps_the_law_that_it_once_broke(path: Path) -> None:
    record = json.loads(path.read_text())
    follower = run_workload(workload_of(record))
    assert follower.ledger.steps > 0
