"""What a policy is: its decisions, and the facts that the rest of the project asks of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from engine.core.block_manager import Hits
from engine.core.config import KernelConfig
from engine.core.plan import Admission
from engine.core.sequence import Sequence
from engine.core.state import KernelState
from engine.core.step import Step
from engine.core.waiting import FcfsQueue, WaitingQueue


class Policy(ABC):
    """Decides steps; one object per scheduler.

    The class attributes and the methods above `fill` are facts. The configuration, the audit, the
    simulator and the suites ask for them instead of for a policy's name.
    """

    # Options of KernelConfig that this policy understands besides those that all share.
    options: ClassVar[frozenset[str]]
    # Freed blocks without a key are reused before all others.
    unregistered_first: ClassVar[bool]
    # Which of several copies of one key a lookup returns: the newest, or the oldest.
    serve_newest: ClassVar[bool]
    # Full blocks get their key when the step that fills them is scheduled, not when it is done.
    registers_when_scheduled: ClassVar[bool]
    # A half-done prompt stays at the head of waiting, with the blocks of its whole sequence.
    waiting_head_holds_blocks: ClassVar[bool]

    @classmethod
    def bounds_holders(cls, config: KernelConfig) -> bool:
        """Whether sequences that hold blocks are bounded by `max_num_seqs` (LAW-S2)."""
        return True

    @classmethod
    def ends_at_max_model_len(cls, config: KernelConfig) -> bool:
        """Whether a sequence also ends when it reaches `max_model_len`."""
        return True

    def make_waiting(self) -> WaitingQueue:
        """An empty waiting queue in this policy's order."""
        return FcfsQueue()

    @abstractmethod
    def fill(self, state: KernelState, step: Step) -> None:
        """Decides who computes what in this step."""

    @abstractmethod
    def serve(
        self, state: KernelState, step: Step, num_rows: int, chunks: list[tuple[Sequence, int]]
    ) -> None:
        """Serves the oldest `num_rows` decodes and the chunks, and sees to their keys."""

    @abstractmethod
    def admits_none(self, state: KernelState, num_rows: int) -> bool:
        """Whether no waiting request can be admitted while only `num_rows` decodes go on.

        May answer False although the truth is True; never the reverse.
        """


def admit(state: KernelState, step: Step, sequence: Sequence, hits: Hits, num_tokens: int) -> None:
    """Gives a waiting sequence its hits and the blocks for `num_tokens`, and records both."""
    state.manager.admit(sequence, hits, num_tokens)
    step.note_blocks(sequence, tuple(sequence.block_table))
    found = len(hits.block_ids)
    step.admitted.append(
        Admission(
            request_id=sequence.request_id,
            hit_tokens=hits.num_blocks * state.manager.block_size,
            hit_blocks_used=found - hits.num_free - hits.num_same_step,
            hit_blocks_free=hits.num_free,
            hit_blocks_same_step=hits.num_same_step,
            resumed=sequence.num_preemptions > 0,
        )
    )


def stays_short_of_blocks(state: KernelState, hits: Hits, needed: int) -> bool:
    """Whether the head of waiting lacks blocks and decoding can bring it no further hit.

    Decodes only take free blocks. They can help the head only by filling the very block that its
    lookup missed, which lies as deep as its hits; a sequence with more cached blocks is past it.
    """
    if needed <= state.manager.pool.num_free:
        return False
    depth = len(hits.block_ids)
    return not state.manager.caching or all(
        member.num_cached_blocks > depth for member in state.decodes.members.values()
    )
