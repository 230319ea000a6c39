"""What an adapter must provide. See docs/conformance.md for a guided tour."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

from engine.core.errors import LockstepError


class AdapterProblem(LockstepError):
    """An adapter lacks a call, raised in it, or returned nonsense; never a pass.

    `call` is the call, with its arguments; `laws` are what could not be judged because of it.
    """

    def __init__(self, call: str, problem: str, laws: str = "all laws") -> None:
        super().__init__(f"{call}: {problem} (not judged: {laws})")
        self.call = call
        self.problem = problem
        self.laws = laws

    def __reduce__(self) -> tuple[type[AdapterProblem], tuple[str, str, str]]:
        return type(self), (self.call, self.problem, self.laws)


@runtime_checkable
class SchedulerAdapter(Protocol):
    """A foreign scheduler behind plain values. Request ids are integers.

    `policy` is the nearer relative: `mixed` if blocks become findable when they are assigned,
    `prefill_first` if they do once they are computed. `opt_out` are ids of laws that the scheduler
    does not claim. `kernel_options` are `KernelConfig` fields that the kit must set, for example
    `{"enable_prefix_caching": False}` or `{"bound_holders": False}`.
    """

    policy: str
    opt_out: Collection[str]
    kernel_options: Mapping[str, object]

    def start(self, config: Mapping[str, object]) -> None:
        """Begins afresh with a configuration (the fields of `KernelConfig`)."""
        ...

    def add(
        self,
        request_id: int,
        prompt: Sequence[int],
        max_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> None:
        """Queues a request. It may raise `ValueError` for one that can never run."""
        ...

    def schedule(self) -> Sequence[tuple[int, int, int]]:
        """Decides a step: (request id, first position, number of tokens) in batch order."""
        ...

    def commit(self, tokens: Mapping[int, int]) -> Sequence[tuple[int, str]]:
        """Books the token of each id; returns (id, `stop` or `length`) of those that ended."""
        ...

    def waiting(self) -> Sequence[int]:
        """Ids of waiting requests, front first; preempted ones are among them."""
        ...

    def running(self) -> Sequence[int]:
        """Ids of running requests, oldest first."""
        ...

    def block_table(self, request_id: int) -> Sequence[int]:
        """The blocks of a live request; empty if it holds none."""
        ...

    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        ...


# Calls that an adapter may also have, and the laws that need them.
OPTIONAL = {
    "abort": "L8",
    "free_blocks": "LAW-B2, LAW-K9, LAW-K10, LAW-B11",
}
REQUIRED = (
    "start",
    "add",
    "schedule",
    "commit",
    "waiting",
    "running",
    "block_table",
    "num_free_blocks",
)
