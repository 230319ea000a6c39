"""The laws as data: id, sentence, where it holds, what checks it, and what breaks it on purpose."""

from properties.laws.kernel import KERNEL_LAWS
from properties.laws.registry import BUDGET, Law, caught, resolve

__all__ = ["BUDGET", "KERNEL_LAWS", "Law", "all_laws", "caught", "resolve"]


def all_laws() -> tuple[Law, ...]:
    """Every law, those of the simulator last (they need the package `sim`)."""
    from properties.laws.simulator import SIMULATOR_LAWS

    return KERNEL_LAWS + SIMULATOR_LAWS
