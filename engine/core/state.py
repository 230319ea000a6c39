"""What the scheduler knows between steps, and the moves that every policy shares."""

from __future__ import annotations

from engine.core.block_manager import BlockManager
from engine.core.config import KernelConfig
from engine.core.decode_set import DecodeSet
from engine.core.request import RequestId
from engine.core.sequence import Sequence
from engine.core.waiting import FcfsQueue, WaitingQueue


class KernelState:
    """Queues, tables and the decode set of one scheduler.

    `running` is in order of admission (oldest first). `partial_prefills` are its members whose
    known tokens are not all computed; under `prefill_first` a half-done prompt stays in `waiting`.
    """

    def __init__(
        self, config: KernelConfig, manager: BlockManager, waiting: WaitingQueue | None = None
    ) -> None:
        self.config = config
        self.manager = manager
        self.decodes = DecodeSet(config.block_size)
        self.sequences: dict[RequestId, Sequence] = {}
        self.waiting: WaitingQueue = FcfsQueue() if waiting is None else waiting
        self.running: dict[RequestId, Sequence] = {}
        self.partial_prefills: dict[RequestId, Sequence] = {}
        self._next_arrival = 0
        self._next_admission = 1

    def add(self, sequence: Sequence) -> None:
        """Takes in a new request."""
        sequence.arrival_index = self._next_arrival
        self._next_arrival += 1
        arrival = sequence.request.arrival
        sequence.arrival = sequence.arrival_index if arrival is None else arrival
        self.sequences[sequence.request_id] = sequence
        self.waiting.add(sequence)

    def num_computed_tokens(self, sequence: Sequence) -> int:
        """Leading tokens whose KV is valid, or will be once the open plans are computed."""
        if sequence.decoding:
            return self.decodes.num_tokens(sequence) - 1  # LAW-S5
        return sequence.num_computed_tokens

    def run(self, sequence: Sequence) -> None:
        """Puts a sequence behind all running ones."""
        sequence.admission_index = self._next_admission
        self._next_admission += 1
        self.running[sequence.request_id] = sequence

    def newest(self) -> Sequence:
        """The running sequence that gives way: the newest (LAW-S10).

        Also one that only waits for its last token (P-P6): its blocks come back at no cost.
        """
        assert self.running, "LAW-T4: only running sequences ask for blocks"
        return next(reversed(self.running.values()))

    def preempt(self, sequence: Sequence) -> None:
        """Sends a running sequence back to waiting, to be recomputed (LAW-S6).

        Its tokens in flight are appended while it waits, and may end it there (P-P7).
        """
        self._stop_running(sequence)
        self.manager.release(sequence)
        sequence.num_preemptions += 1
        self.waiting.put_back(sequence)

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
