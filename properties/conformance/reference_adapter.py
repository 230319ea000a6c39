"""The naive reference behind an adapter: an example with chunks, a prefix cache and aborts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.config import KernelConfig
from engine.core.errors import RequestRejected
from engine.core.request import Request
from engine.core.tokens import Prompt
from properties.reference import ReferencePlan, ReferenceScheduler


class ReferenceAdapter:
    """Opts out of nothing."""

    policy = "mixed"
    opt_out: tuple[str, ...] = ()
    kernel_options: Mapping[str, object] = {}

    def start(self, config: Mapping[str, Any]) -> None:
        """Builds the scheduler."""
        self.scheduler = ReferenceScheduler(KernelConfig(**config))
        self.plan: ReferencePlan | None = None

    def add(
        self,
        request_id: int,
        prompt: Sequence[int],
        max_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> None:
        """Queues; its own rejections are ValueErrors already."""
        stops = frozenset(stop_token_ids)
        try:
            self.scheduler.add(Request(request_id, Prompt(prompt), max_tokens, stops))
        except RequestRejected as rejection:
            raise ValueError(str(rejection)) from rejection

    def abort(self, request_id: int) -> None:
        """Ends a request at once."""
        self.scheduler.abort(request_id)

    def schedule(self) -> Sequence[tuple[int, int, int]]:
        """Id, first position, number of tokens."""
        self.plan = self.scheduler.schedule()
        return [(int(e.request_id), e.first_position, e.num_tokens) for e in self.plan.entries]

    def commit(self, tokens: Mapping[int, int]) -> Sequence[tuple[int, str]]:
        """Id and reason of those that ended."""
        assert self.plan is not None
        outcome = self.scheduler.commit(self.plan, [tokens[int(n)] for n in self.plan.sampled_ids])
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


class NanoAdapter(ReferenceAdapter):
    """The same under nano-vLLM's policy, without our hardenings; it serves prompts first."""

    policy = "prefill_first"
    opt_out: tuple[str, ...] = ("L9",)
    kernel_options: Mapping[str, object] = {"bound_holders": False, "bound_decode_tokens": False}
