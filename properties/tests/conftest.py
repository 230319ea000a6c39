"""Loads the Hypothesis profile for the property suites."""

from __future__ import annotations

import time

import hypothesis.core

from properties.search import profiles

PROFILE = profiles.load()
if PROFILE == "nightly" and hypothesis.core.global_force_seed is None:
    # A fresh seed each night; the report's header says which, so that --hypothesis-seed repeats it.
    hypothesis.core.global_force_seed = time.time_ns() // 1_000_000_000  # type: ignore[assignment]


def pytest_report_header() -> str:
    """Names the profile and the seed."""
    return f"hypothesis profile {PROFILE}, seed {hypothesis.core.global_force_seed}"
