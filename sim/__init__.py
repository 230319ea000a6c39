"""The simulator: the shared kernel driven by simulated time (SimPy, integer nanoseconds).

Owns costs, workloads, servers, metrics and planning. Imports `engine.core` and `engine.steplog`,
never torch. The package itself offers `simulate`, which loads the rest when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.commands.simulate import simulate

__all__ = ["simulate"]


def __getattr__(name: str) -> object:
    """Imports `simulate` on first use: most importers of `sim.x` never need it."""
    if name != "simulate":
        raise AttributeError(f"module 'sim' has no attribute {name!r}")
    from sim.commands.simulate import simulate

    return simulate
