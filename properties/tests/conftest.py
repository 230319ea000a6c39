"""Loads the Hypothesis profile for the property suites and leaves out what is for the night."""

from __future__ import annotations

import time

import hypothesis.core
import pytest

from properties.search import profiles

PROFILE = profiles.load()
if PROFILE == "nightly" and hypothesis.core.global_force_seed is None:
    # A fresh seed each night; the report's header says which, so that --hypothesis-seed repeats it.
    hypothesis.core.global_force_seed = time.time_ns() // 1_000_000_000  # type: ignore[assignment]


def pytest_report_header() -> str:
    """Names the profile and the seed."""
    return f"hypothesis profile {PROFILE}, seed {hypothesis.core.global_force_seed}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked nightly unless HYPOTHESIS_PROFILE=nightly."""
    if PROFILE == "nightly":
        return
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.skip(reason="runs with HYPOTHESIS_PROFILE=nightly"))
