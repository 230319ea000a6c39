"""Leaves out what is for the night, whichever folder is run."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked nightly unless HYPOTHESIS_PROFILE=nightly."""
    if os.environ.get("HYPOTHESIS_PROFILE") == "nightly":
        return
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.skip(reason="runs with HYPOTHESIS_PROFILE=nightly"))
