"""Routers: which replica gets a request. None of them knows how long its output will be."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.core import ConfigError, Prompt
from engine.core.tokens import Content


class Replica(Protocol):
    """What a router sees of a server."""

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens and outputs so far of the unfinished requests."""
        ...

    @property
    def kv_use(self) -> float:
        """Share of its KV blocks that unfinished requests hold."""
        ...

    def sync(self) -> None:
        """Brings the load up to the present time."""
        ...


class Router(Protocol):
    """Chooses a replica for each request, in order of arrival."""

    def choose(self, prompt: Prompt, replicas: Sequence[Replica]) -> int:
        """Index of the replica."""
        ...


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, prompt: Prompt, replicas: Sequence[Replica]) -> int:
        """Index of the replica."""
        chosen = self._next
        self._next = (chosen + 1) % len(replicas)
        return chosen


class LeastOutstandingTokens:
    """The replica with the fewest tokens in its unfinished requests; the first of equals."""

    def choose(self, prompt: Prompt, replicas: Sequence[Replica]) -> int:
        """Index of the replica."""
        for replica in replicas:
            replica.sync()
        return min(range(len(replicas)), key=lambda index: replicas[index].outstanding_tokens)


class LeastKv:
    """The replica with the least of its KV pool in use; of equals, the one with fewest tokens.

    Waiting requests hold no blocks yet, so those who arrive together are told apart by tokens.
    """

    def choose(self, prompt: Prompt, replicas: Sequence[Replica]) -> int:
        """Index of the replica."""
        for replica in replicas:
            replica.sync()
        loads = [(replica.kv_use, replica.outstanding_tokens) for replica in replicas]
        return loads.index(min(loads))


class PowerOfTwo:
    """The replica with fewer outstanding tokens of two that are drawn by lot.

    The lots have a seed of their own, so that a run can be repeated.
    """

    def __init__(self, seed: int = 0) -> None:
        self._lots = random.Random(seed)
        self._least = LeastOutstandingTokens()

    def choose(self, prompt: Prompt, replicas: Sequence[Replica]) -> int:
        """Index of the replica."""
        drawn = sorted(self._lots.sample(range(len(replicas)), min(2, len(replicas))))
        return drawn[self._least.choose(prompt, [replicas[index] for index in drawn])]


class PrefixAffine:
    """The replica that was sent the longest prefix of the prompt, unless it is overloaded.

    Overloaded means more than `imbalance` times the least load plus one such prompt. Prefixes are
    remembered in pieces of `piece_tokens`, the least recently used beyond `capacity` forgotten.
    """

    def __init__(
        self, piece_tokens: int = 256, capacity: int = 1 << 17, imbalance: float = 1.5
    ) -> None:
        self._piece_tokens, self._capacity, self._imbalance = piece_tokens, capacity, imbalance
        # (number of the piece before, content) -> (own number, replicas that were sent it)
        self._pieces: OrderedDict[tuple[int, Content], tuple[int, set[int]]] = OrderedDict()
        self._num_pieces = 0
        self._least = LeastOutstandingTokens()

    def choose(self, prompt: Prompt, replicas: Sequence[Replica]) -> int:
        """Index of the replica."""
        least = self._least.choose(prompt, replicas)
        bound = self._imbalance * replicas[least].outstanding_tokens + len(prompt)
        chosen = least
        holders = self._longest_match(prompt)
        if holders:
            near = min(sorted(holders), key=lambda index: replicas[index].outstanding_tokens)
            if replicas[near].outstanding_tokens <= bound:
                chosen = near
        self._remember(prompt, chosen)
        return chosen

    def _longest_match(self, prompt: Prompt) -> set[int]:
        before, holders = 0, set[int]()
        for start in range(0, len(prompt) - self._piece_tokens + 1, self._piece_tokens):
            known = self._pieces.get((before, prompt.content(start, start + self._piece_tokens)))
            if known is None:
                break
            before, holders = known
        return holders

    def _remember(self, prompt: Prompt, replica: int) -> None:
        before = 0
        for start in range(0, len(prompt) - self._piece_tokens + 1, self._piece_tokens):
            key = (before, prompt.content(start, start + self._piece_tokens))
            known = self._pieces.get(key)
            if known is None:
                self._num_pieces += 1
                known = self._pieces[key] = (self._num_pieces, set())
            known[1].add(replica)
            self._pieces.move_to_end(key)
            before = known[0]
        while len(self._pieces) > self._capacity:
            self._pieces.popitem(last=False)


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-tokens": LeastOutstandingTokens,
    "prefix-affine": PrefixAffine,
    "least-kv": LeastKv,
    "power-of-two": PowerOfTwo,
}


def make_router(name: str) -> Router:
    """A new router.

    Raises:
        ConfigError: no such router.
    """
    if name not in ROUTERS:
        raise ConfigError("router", name, f"must be one of {', '.join(ROUTERS)}")
    return ROUTERS[name]()
