"""Hypothesis profiles `ci` (the default), `dev`, `nightly`, `mutate`: see HYPOTHESIS_PROFILE."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

# A machine step is cheap but not free; health checks that measure time would be flaky here.
_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)

settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    max_examples=200,
    stateful_step_count=50,
    suppress_health_check=_SLOW,
)
settings.register_profile(
    "dev", parent=settings.get_profile("ci"), derandomize=False, max_examples=50
)
settings.register_profile(
    "nightly",
    parent=settings.get_profile("ci"),
    derandomize=False,
    max_examples=3000,
    stateful_step_count=120,
)
settings.register_profile(
    "mutate",
    parent=settings.get_profile("ci"),
    max_examples=25,
    stateful_step_count=25,
    phases=(Phase.explicit, Phase.generate),
)


def load() -> str:
    """Loads the profile that the environment names and returns its name."""
    name = os.environ.get("HYPOTHESIS_PROFILE", "ci")
    settings.load_profile(name)
    return name
