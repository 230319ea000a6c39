"""What the scheduler knows between steps, and the moves that every policy shares."""

from __future__ import annotations

from collections import deque

from engine.core.block_manager import BlockManager
from engine.core.config import KernelConfig
from engine.core.decode_set import DecodeSet
from engine.core.request import RequestId
from engine.core.sequence import Sequence


class KernelState:
    """Queues, tables and the decode set of one scheduler.

    `running` is in order of admission (oldest first). `partial_prefills` are its members whose
    known tokens are not all computed; under `prefill_first` a half-done prompt stays in `waiting`.
    """

    def __init__(self, config: KernelConfig, manager: BlockManager) -> None:
        self.config = config
        self.manager = manager
        self.decodes = DecodeSet(config.block_size)
        self.sequences: dict[RequestId, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.running: dict[RequestId, Sequence] = {}
        self.partial_prefills: dict[RequestId, Sequence] = {}
        self._next_admission = 1

    def run(self, sequence: Sequence) -> None:
        """Puts a sequence behind all running ones."""
        sequence.admission_index = self._next_admission
        self._next_admission += 1
        self.running[sequence.request_id] = sequence

    def newest(self) -> Sequence:
        """Whom to preempt: the newest running sequence that has tokens to compute (LAW-S10)."""
        for sequence in reversed(self.running.values()):
            request_id = sequence.request_id
            if request_id in self.decodes.members or request_id in self.partial_prefills:
                return sequence
        raise AssertionError("LAW-T4: only running sequences ask for blocks")

    def preempt(self, sequence: Sequence) -> None:
        """Sends a running sequence back to the head of waiting, to be recomputed (LAW-S6)."""
        self._stop_running(sequence)
        self.manager.release(sequence)
        sequence.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out of every queue; its blocks stay its own."""
        del self.sequences[sequence.request_id]
        if sequence.request_id in self.running:
            self._stop_running(sequence)
        else:
            self.waiting.remove(sequence)
        self.manager.forget_chain(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        del self.running[sequence.request_id]
        self.partial_prefills.pop(sequence.request_id, None)
        if sequence.request_id in self.decodes.members:
            self.decodes.leave(sequence)
        self.decodes.leave_batch(sequence)
