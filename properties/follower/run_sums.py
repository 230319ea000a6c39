"""What the follower knows of each request, and the sums over a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from engine.core.request import Request, RequestId
from properties.reference.stand_in_model import extend_hash, hash_chain, root_hash


class Track:
    """One live request as the follower believes it to be."""

    __slots__ = (
        "arrival",
        "cached",
        "computed",
        "ended",
        "first_token",
        "hashes",
        "idle_steps",
        "outputs",
        "pending",
        "preempted",
        "request",
        "reserved",
        "sampled",
        "seed",
        "stale",
        "table",
        "tokens",
        "wants_abort",
    )

    def __init__(self, request: Request, arrival: int, seed: int) -> None:
        self.request = request
        self.arrival = arrival
        self.seed = seed
        self.tokens = len(request.prompt)  # known tokens
        self.hashes = hash_chain(root_hash(request.extra_keys), request.prompt)
        self.outputs: list[int] = []
        self.table: list[int] = []
        self.computed = 0
        self.cached = 0  # leading blocks of the table that have a key
        self.reserved = 0  # positions that the table must have room for
        self.pending = 0  # sampled tokens that are still on their way (async)
        self.sampled = False  # since its last admission
        self.first_token = False
        self.stale = False  # its newest token came while it waited (async)
        self.preempted = 0
        self.idle_steps = 0  # in a row, while it decodes
        self.wants_abort = False
        self.ended = False

    @property
    def rank(self) -> tuple[int, int]:
        """Lower goes first under the policy `priority`."""
        arrival = self.request.arrival
        return self.request.priority, self.arrival if arrival is None else arrival

    def append(self, token: int, decoding: bool = True) -> None:
        """One more output; it goes on decoding unless it was preempted meanwhile (async)."""
        self.outputs.append(token)
        self.tokens += 1
        self.hashes.append(extend_hash(self.hashes[-1], token))
        self.sampled = decoding
        self.stale = not decoding
        self.first_token = True


@dataclass(slots=True)
class Ledger:
    """Sums and sets over one run."""

    added: set[RequestId] = field(default_factory=set)
    num_added: int = 0
    rejected: set[RequestId] = field(default_factory=set)
    ended: dict[RequestId, str] = field(default_factory=dict)
    outputs: dict[RequestId, list[int]] = field(default_factory=dict)
    steps: int = 0
    preemptions: int = 0
    scheduled: int = 0  # tokens over all steps
    finished_work: int = 0  # prompt + outputs - 1 of finished requests
    preempted_work: int = 0
    hit_tokens: int = 0
    aborted_work: int = 0
    goals: Counter[str] = field(default_factory=Counter)
