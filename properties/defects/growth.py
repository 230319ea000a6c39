"""Defects that show only in long runs: what is kept grows with what has passed."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq

from engine.core.config import KernelConfig
from engine.core.decode_set import DecodeSet
from engine.core.hashing import ChainNode, ExtraKeys, PrefixIndex
from engine.core.plan import Finished
from engine.core.sequence import Sequence
from properties.defects.planting import Planted


class _PushingDecodeSet(DecodeSet):
    def advance(self, unscheduled: Seq[Sequence] = ()) -> None:
        super().advance(unscheduled)
        for sequence in unscheduled:
            self._watch_limit(sequence)

    def _watch_limit(self, sequence: Sequence) -> None:
        limit = (sequence.limit - sequence.base, sequence.admission_index, sequence.request_id)
        heapq.heappush(self._limits, limit)


class EntersLimitsAnew(Planted):
    """A decode that is passed over gets one more entry in the heap (our own until 2026-12)."""

    decodes_class = _PushingDecodeSet


class _FaithfulIndex(PrefixIndex):
    def root(self, extra_keys: ExtraKeys) -> ChainNode:
        is_new = extra_keys not in self._roots
        root = super().root(extra_keys)
        root.ref_count += is_new
        return root


class KeepsSalts(Planted):
    """The root of every salt that was ever seen stays in the index (our own until 2026-12)."""

    index_class = _FaithfulIndex


class RemembersTheEnded(Planted):
    """Ids of ended requests are kept."""

    def __init__(self, config: KernelConfig) -> None:
        super().__init__(config)
        self._names: list[object] = []

    def _retire(self, sequence: Sequence, reason: str) -> Finished:
        self._names.append(sequence.request_id)
        return super()._retire(sequence, reason)


class _KeepingIndex(PrefixIndex):
    def _forget(self, node: ChainNode) -> None:
        if node.extra_keys is not None:
            super()._forget(node)


class KeepsNodes(Planted):
    """Keys that no block and no sequence needs any longer stay in the index."""

    index_class = _KeepingIndex


LEAKS = (EntersLimitsAnew, KeepsSalts, RemembersTheEnded, KeepsNodes)
