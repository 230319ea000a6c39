"""What the model prints: calls, what they met, and the state after each of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple


class RequestState(NamedTuple):
    """One request, as far as kernel and model must agree on it."""

    state: str  # waiting, running or gone
    known: int
    pending: int
    computed: int
    cached: int
    table: tuple[int, ...]


class State(NamedTuple):
    """What is compared after every call."""

    open: int
    free: tuple[int, ...]
    keys: tuple[int, ...]
    requests: tuple[RequestState, ...]


class Ended(NamedTuple):
    """A request that a call ended, with its number of tokens."""

    request: int
    reason: str
    tokens: int


class Call(NamedTuple):
    """One call of the model, with the depth at which the checker made it (0 in a trace)."""

    name: str
    arguments: tuple[int, ...]
    met: tuple[str, ...]
    ended: tuple[Ended, ...]
    after: State
    depth: int = 0

    def to_json(self) -> list[object]:
        """Nested lists, which `call_of` reads again."""
        return [self.name, self.arguments, self.met, self.ended, self.after]


GONE = RequestState("gone", 0, 0, 0, 0, ())
_REASONS = {"STOP": "stop", "LENGTH": "length", "ABORTED": "abort", "ERROR": "error"}


def call_of(values: list[Any]) -> Call:
    """A call from what `to_json` made of it."""
    name, arguments, met, ended, (num_open, free, keys, requests) = values
    states = tuple(RequestState(*request)._replace(table=tuple(request[5])) for request in requests)
    after = State(num_open, tuple(free), tuple(keys), states)
    return Call(name, tuple(arguments), tuple(met), tuple(Ended(*end) for end in ended), after)


def read_calls(lines: Iterable[str]) -> Iterator[Call]:
    """The calls that a run of Spin printed; a call that it left half-way is none."""
    depth = num_open = 0
    name = ""
    lists: dict[str, tuple[int, ...]] = {}
    arguments: tuple[int, ...] = ()
    met: list[str] = []
    ended: list[Ended] = []
    requests: list[RequestState] = []
    for line in lines:
        word, _, rest = line.strip().partition(" ")
        values = rest.split()
        if word == "depth":
            depth = int(rest)
        elif word == "call":
            name, arguments = values[0].lower(), tuple(map(int, values[1:]))
            met, ended, requests = [], [], []
        elif word == "met":
            met.append(rest.lower())
        elif word == "ended":
            ended.append(Ended(int(values[0]), _REASONS[values[1]], int(values[2])))
        elif word == "open":
            num_open = int(rest)
        elif word in ("free", "keys"):
            lists[word] = tuple(map(int, values))
        elif word == "request":
            known, pending, computed, cached, *table = map(int, values[1:])
            state = values[0].lower()
            requests.append(
                RequestState(state, known, pending, computed, cached, tuple(table))
                if state != "gone"
                else GONE
            )
        elif word == "done":
            after = State(num_open, lists["free"], lists["keys"], tuple(requests))
            yield Call(name, arguments, tuple(met), tuple(ended), after, depth)
