"""Lockstep's own kernel behind an adapter: an example with a weak hash and asynchronous steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from engine.core.config import KernelConfig
from engine.core.errors import RequestRejected
from engine.core.plan import StepPlan
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.tokens import Prompt


class KernelAdapter:
    """Opts out of nothing; a subclass may put a defect in the kernel's place."""

    policy = "mixed"
    opt_out: tuple[str, ...] = ()
    kernel_options: Mapping[str, object] = {}
    asynchronous = False
    scheduler_class: ClassVar[type[Scheduler]] = Scheduler

    def start(self, config: Mapping[str, Any]) -> None:
        """Builds the scheduler, with its full hash."""
        self.config = KernelConfig(**{**config, "hash_bits": 64})
        self.scheduler = self.scheduler_class(self.config)
        self.open: deque[StepPlan] = deque()

    def weaken_hash(self, bits: int) -> None:
        """Keys keep only so many bits."""
        self.scheduler = self.scheduler_class(replace(self.config, hash_bits=bits))

    def add(
        self,
        request_id: int,
        prompt: Sequence[int],
        max_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> None:
        """Queues; a rejection is a ValueError."""
        stops = frozenset(stop_token_ids)
        try:
            self.scheduler.add(Request(request_id, Prompt(prompt), max_tokens, stops))
        except RequestRejected as rejection:
            raise ValueError(str(rejection)) from rejection

    def abort(self, request_id: int) -> None:
        """Ends a request; the kit asks for it between steps only."""
        self.scheduler.abort(request_id)

    def schedule(self) -> Sequence[tuple[int, int, int]]:
        """Id, first position, number of tokens."""
        plan = self.scheduler.schedule()
        self.open.append(plan)
        return [(int(e.request_id), e.first_position, e.num_tokens) for e in plan.entries]

    def commit(self, tokens: Mapping[int, int]) -> Sequence[tuple[int, str]]:
        """Books the oldest step; returns id and reason of those that ended."""
        plan = self.open.popleft()
        outcome = self.scheduler.commit(plan, [tokens[int(name)] for name in plan.sampled_ids])
        return [(int(ended.request_id), ended.reason) for ended in outcome.finished]

    def waiting(self) -> Sequence[int]:
        """Front first."""
        return [int(name) for name in self.scheduler.waiting_ids()]

    def running(self) -> Sequence[int]:
        """Oldest first."""
        return [int(name) for name in self.scheduler.running_ids()]

    def block_table(self, request_id: int) -> Sequence[int]:
        """Its blocks."""
        return self.scheduler.block_table(request_id)

    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self.scheduler.num_free_blocks

    def free_blocks(self) -> Sequence[int]:
        """Next one first."""
        return self.scheduler.free_order()


class AsyncKernelAdapter(KernelAdapter):
    """The same with one step decided ahead."""

    asynchronous = True
