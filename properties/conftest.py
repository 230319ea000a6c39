"""Loads the Hypothesis profile for the property suites and leaves out what is for the night."""

from __future__ import annotations

import pytest

from properties import profiles

PROFILE = profiles.load()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked nightly unless HYPOTHESIS_PROFILE=nightly."""
    if PROFILE == "nightly":
        return
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.skip(reason="runs with HYPOTHESIS_PROFILE=nightly"))
