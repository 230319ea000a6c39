"""Defects that only users feel: LAW-L9 and LAW-L10."""

from __future__ import annotations

from engine.core.policies.mixed import MixedPolicy
from engine.core.sequence import Sequence
from engine.core.state import KernelState
from engine.core.step import Step
from properties.defects.decisions import PreemptsOldest
from properties.defects.planting import Mutant, Planted


class _PromptsFirstPolicy(MixedPolicy):
    def _allot(self, state: KernelState, step: Step) -> tuple[int, list[tuple[Sequence, int]]]:
        num_rows, chunks = super()._allot(state, step)
        return (0, chunks) if chunks else (num_rows, chunks)


class StarvesDecodes(Planted):
    """No decode is served in a step that carries a part of a prompt (nano-vLLM, by design)."""

    mixed_class = _PromptsFirstPolicy


MUTANTS = (
    Mutant("L9", StarvesDecodes, "BUG-B05", "mixed"),
    Mutant("L10", PreemptsOldest, "own"),
)
