"""What an adapter must provide. See docs/conformance.md for a guided tour."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

from engine.core.errors import LockstepError


class AdapterProblem(LockstepError):
    """An adapter lacks a call or returned nonsense; never a pass.

    `call` is the call, with its arguments; `laws` are what could not be judged because of it.
    """

    def __init__(self, call: str, problem: str, laws: str = "all laws") -> None:
        super().__init__(f"{call}: {problem} (not judged: {laws})")
        self.call = call
        self.problem = problem
        self.laws = laws

    def __reduce__(self) -> tuple[type[AdapterProblem], tuple[str, str, str]]:
        return type(self), (self.call, self.problem, self.laws)


class AdapterCrash(LockstepError):
    """The scheduler raised inside a call; its cause is what it raised."""

    def __init__(self, call: str, error: str) -> None:
        super().__init__(f"{call} raised {error}")
        self.call = call
        self.error = error

    def __reduce__(self) -> tuple[type[AdapterCrash], tuple[str, str]]:
        return type(self), (self.call, self.error)


class ConfigurationRefused(LockstepError):
    """`start` raised a `ValueError`: the scheduler does not claim this configuration."""


@runtime_checkable
class SchedulerAdapter(Protocol):
    """A foreign scheduler behind plain values. Request ids are integers.

    `policy` is the nearer relative: `mixed` if blocks become findable when they are assigned,
    `prefill_first` if they do once they are computed. `opt_out` are ids of laws that the scheduler
    does not claim. `kernel_options` are `KernelConfig` fields that the kit must set: a value
    (`{"enable_prefix_caching": False}`), the allowed values (`{"block_size": range(2, 17)}`), or a
    function of the fields so far
    (`{"max_num_batched_tokens": lambda config: max(8, config["max_num_seqs"])}`).

    An adapter with `asynchronous = True` is asked for a second step before the first one's tokens
    are committed; `commit` then speaks of the older one, and holds tokens of ended requests too.
    """

    policy: str
    opt_out: Collection[str]
    kernel_options: Mapping[str, object]

    def start(self, config: Mapping[str, object]) -> None:
        """Begins afresh with the fields of `KernelConfig`; a `ValueError` refuses them."""
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


# Calls that an adapter may also have, and the laws that are not judged without them.
OPTIONAL = {
    "abort": frozenset({"L8"}),
    "free_blocks": frozenset({"B2", "K9", "K10", "B11"}),
    # weaken_hash(bits), after start: keys keep that many bits, so that different blocks collide.
    "weaken_hash": frozenset({"K11"}),
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
