"""Defects for the probes: they show only when runs are compared, or inside the kernel."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.sequence import Sequence
from engine.core.state import KernelState
from engine.core.step import Step
from properties.defects.planting import Planted


class _SkipsStep(Step):
    __slots__ = ()

    def book(self, state: KernelState) -> list[Sequence]:
        ending = super().book(state)
        for sequence, _ in self.chunks:
            if sequence.num_computed_tokens + 1 < sequence.num_tokens and not sequence.decoding:
                sequence.num_computed_tokens += 1
        return ending


class SkipsChunkToken(Planted):
    """A continued chunk leaves out one token."""

    step_class = _SkipsStep


@dataclass(frozen=True, slots=True)
class UncheckedConfig:
    """A configuration that accepts everything."""

    num_blocks: object = 1
    max_model_len: object = 2
    block_size: object = 1
    max_num_seqs: object = 1
    max_num_batched_tokens: object = 1
