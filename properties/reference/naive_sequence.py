"""What the reference remembers of a request, and of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.config import KernelConfig
from engine.core.plan import Admission, Entry, NewBlocks
from engine.core.request import Request, RequestId
from properties.reference.naive_pool import ReferenceBlock


class ReferenceSequence:
    """One live request; `computed` counts the tokens whose KV is valid."""

    def __init__(self, request: Request, arrival: int = 0) -> None:
        self.arrival = arrival
        self.request_id = request.request_id
        self.request = request
        self.tokens: list[int] = list(request.prompt)  # prompt and outputs that are known
        self.outputs: list[int] = []
        self.pending = 0  # sampled tokens that are still on their way (async)
        self.computed = 0
        self.table: list[ReferenceBlock] = []
        self.sampled_since_admission = False
        self.preempted = 0
        self.ended = False
        self.aborted = False
        self.serial = 0  # place in the order of entering `running`

    @property
    def remaining(self) -> int:
        """Tokens, those on their way too, whose KV is still to be computed."""
        return len(self.tokens) + self.pending - self.computed

    @property
    def rank(self) -> tuple[int, int]:
        """Lower goes first under the policy `priority`."""
        arrival = self.request.arrival
        return self.request.priority, self.arrival if arrival is None else arrival


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """The decisions of one step, entry by entry."""

    step: int
    entries: tuple[Entry, ...]
    new_blocks: tuple[NewBlocks, ...]
    admitted: tuple[Admission, ...]
    preempted: tuple[RequestId, ...]
    num_free_blocks: int

    @property
    def sampled_ids(self) -> tuple[RequestId, ...]:
        """Ids of the entries that sample a token."""
        return tuple(entry.request_id for entry in self.entries if entry.samples)

    @property
    def num_tokens(self) -> int:
        """Tokens computed by the step."""
        return sum(entry.num_tokens for entry in self.entries)


@dataclass(frozen=True, slots=True)
class Member:
    """One sequence in a batch; `preempted` is how often it had been by then."""

    sequence: ReferenceSequence
    first: int
    count: int
    samples: bool
    preempted: int


@dataclass
class StepDraft:
    """What a step has decided so far."""

    batch: list[Member] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    new_blocks: list[NewBlocks] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    preempted: list[RequestId] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens given out so far."""
        return sum(member.count for member in self.batch)

    def withdraw(self, sequence: ReferenceSequence) -> bool:
        """Takes a sequence's entry back if it has one."""
        mine = [member for member in self.batch if member.sequence is sequence]
        if not mine:
            return False
        self.batch.remove(mine[0])
        name = sequence.request_id
        self.entries = [entry for entry in self.entries if entry.request_id != name]
        self.new_blocks = [new for new in self.new_blocks if new.request_id != name]
        return True


def rejection(config: KernelConfig, request: Request, live: list[RequestId]) -> str | None:
    """Why a request can never run (LAW-C1), or None."""
    length = len(request.prompt)
    if length == 0:
        return "prompt_empty"
    if request.max_tokens < 1:
        return "max_tokens"
    if request.request_id in live:
        return "duplicate_id"
    if not config.reject_impossible:
        return None
    if length >= config.max_model_len:
        return "prompt_too_long"
    outputs = request.max_tokens
    if config.policy != "prefill_first" or config.bound_model_len:
        outputs = min(outputs, config.max_model_len - length)
    # The last sampled token is never written.
    blocks = -(-(length + outputs - 1) // config.block_size)
    return "pool_too_small" if blocks > config.num_blocks else None
