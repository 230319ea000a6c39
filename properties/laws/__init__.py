"""The laws as data: id, sentence, where it holds, what checks it, and what breaks it on purpose.

Owns the registry and the documents made from it. Imports every other room of `properties` that a
law names; none of them imports it but the conformance kit and the commands.
"""

from properties.laws.kernel import KERNEL_LAWS
from properties.laws.registry import BUDGET, Law, caught, resolve
from properties.laws.tiers import TIER_LAWS

__all__ = ["BUDGET", "KERNEL_LAWS", "Law", "all_laws", "caught", "resolve"]


def all_laws() -> tuple[Law, ...]:
    """Every law, those of the simulator last (they need the package `sim`)."""
    from properties.laws.simulator import SIMULATOR_LAWS

    return KERNEL_LAWS + TIER_LAWS + SIMULATOR_LAWS
