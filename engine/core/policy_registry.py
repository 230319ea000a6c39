"""The one registry of policies: a new policy is a file in `policies/` and a line here."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# `module:class`, imported on first use: the configuration, which stands below the policies, checks
# names and options with it.
POLICIES = {
    "mixed": "engine.core.policies.mixed:MixedPolicy",
    "prefill_first": "engine.core.policies.prefill_first:PrefillFirstPolicy",
    "priority": "engine.core.policies.priority:PriorityPolicy",
}


def policy_class(name: str) -> Any:  # noqa: ANN401
    """The class of a registered policy, a subclass of `policies.policy.Policy`."""
    module, _, attribute = POLICIES[name].partition(":")
    return getattr(import_module(module), attribute)
