"""Defects of the host tier: laws H."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from engine.core.config import KernelConfig
from engine.core.hashing import ChainNode
from engine.core.host_tier import HostTier
from engine.core.plan import KvCopy
from engine.core.scheduler import Scheduler


class _Tiered(Scheduler):
    tier_class: ClassVar[type[HostTier]]

    def __init__(self, config: KernelConfig) -> None:
        super().__init__(config)
        manager = self.state.manager
        manager.attach(self.tier_class(config.host_blocks, manager.index))


class _KeepingTier(HostTier):
    def drop(self, node: ChainNode) -> None:
        if not node.blocks or len(self) >= self.num_blocks:
            super().drop(node)


class KeepsWhatThePoolHas(_Tiered):
    """A key that the pool computes anew stays in the tier as well."""

    tier_class = _KeepingTier


class _HastyTier(HostTier):
    def claim(self, nodes: Sequence[ChainNode]) -> list[int]:
        slots = super().claim(nodes)
        self._free_slots.extend(slots)
        return slots

    def load(self, slot: int, block_id: int) -> None:
        self.copies.append(KvCopy(block_id, slot, to_host=False))


class FreesSlotsBeforeLoading(_Tiered):
    """The slots of a hit are free, and may be written, before they have been read."""

    tier_class = _HastyTier


class _ForgetfulTier(HostTier):
    def undo(self, copies: Sequence[KvCopy]) -> None:
        pass


class KeepsCopiesOfFailedSteps(_Tiered):
    """What a failed step should have copied to the host is served later."""

    tier_class = _ForgetfulTier


class _NewestFirstTier(HostTier):
    def offload(self, block_id: int, node: ChainNode) -> None:
        super().offload(block_id, node)
        if node in self._slots:
            self._slots.move_to_end(node, last=False)


class DropsNewest(_Tiered):
    """The tier gives up what came last, not what came first."""

    tier_class = _NewestFirstTier
