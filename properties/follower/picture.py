"""What the follower believes: queues, requests, blocks, open steps, and how it complains.

Everything in this package reads or changes one picture; the arrows go from those who judge
(`follower`) over those who book (`endings`, `tightness`, `moves`) down to here.
"""

from __future__ import annotations

from engine.core.config import KernelConfig
from engine.core.request import RequestId
from properties.follower.pool_picture import BlockPicture
from properties.follower.run_sums import Ledger, Track
from properties.follower.view import LawBroken, PlanView


class OpenStep:
    """What a plan still owes: (track, first position, tokens, samples, table) per entry."""

    __slots__ = ("entries", "number", "plan", "preemptions")

    def __init__(self, plan: PlanView, number: int) -> None:
        self.plan = plan
        self.number = number
        self.entries: list[tuple[Track, int, int, bool, list[int]]] = []
        self.preemptions: list[int] = []  # of each member before this step


class Picture:
    """The state that a scheduler must be in if it kept every law so far."""

    def __init__(
        self,
        config: KernelConfig,
        vocabulary: int,
        only: frozenset[str] | None = None,
        suspended: frozenset[str] = frozenset(),
    ) -> None:
        self.config = config
        self.vocabulary = vocabulary
        self.only = only
        self.suspended = suspended
        self.mixed = config.policy != "prefill_first"
        self.by_priority = config.policy == "priority"
        self.blocks = BlockPicture(
            config.num_blocks, config.block_size, self.mixed, newest_copy=not self.mixed
        )
        self.live: dict[RequestId, Track] = {}
        self.waiting: list[Track] = []
        self.running: list[Track] = []
        self.open: list[OpenStep] = []
        self.ledger = Ledger()

    @property
    def seats(self) -> int:
        """How many requests may run."""
        return self.config.max_num_active_seqs or self.config.max_num_seqs

    @property
    def spreads_prefill(self) -> bool:
        """Whether prompts are held back in some steps (P-R4)."""
        return self.config.prefill_schedule_interval > 1

    def complain(self, law: str, detail: str) -> None:
        """Reports a broken law unless it is switched off."""
        if law in self.suspended or (self.only is not None and law not in self.only):
            return
        raise LawBroken(law, f"step {self.ledger.steps}: {detail}")
