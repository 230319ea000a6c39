"""Exhaustive small scope: every reachable state of the real kernel for a few tiny requests.

Breadth-first search. From each state: add any of the shapes (until all requests were added), abort
any live request (if asked for, also while the step is open), or do one step with every
combination of sampled tokens. States are told apart by all that the kernel holds (`kernel_state`)
and by what the follower believes; only the names of blocks and requests do not count.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import product
from typing import Any

from engine.arguments.parser import VerbParser
from engine.arguments.suggest import one_of
from engine.core.audit import audit
from engine.core.config import KernelConfig
from engine.core.errors import ConfigError
from engine.core.request import RequestId
from engine.core.scheduler import Scheduler
from properties.follower import Follower
from properties.reference import ReferenceScheduler
from properties.search.driver import Driver
from properties.search.kernel_state import kernel_state
from properties.search.run import Factory, kernel

Shape = tuple[tuple[int, ...], int]  # prompt, max_tokens
VOCABULARY = 2


@dataclass(frozen=True, slots=True)
class Scope:
    """How much is enumerated."""

    requests: int
    shapes: tuple[Shape, ...]
    stop: bool = True  # token 1 ends a request
    aborts: bool = False


@dataclass(slots=True)
class Enumeration:
    """The size of what was enumerated."""

    states: int = 0
    pictures: int = 0  # states that the follower can tell apart
    transitions: int = 0
    unlike: int = 0  # states from which other pictures follow than from their picture's first state
    seconds: float = 0.0


def prompts_up_to(length: int) -> tuple[Shape, ...]:
    """All prompts over two tokens up to a length (30 for length 4), two outputs each."""
    return tuple(
        (prompt, 2)
        for size in range(1, length + 1)
        for prompt in product(range(VOCABULARY), repeat=size)
    )


SIX_SHAPES: tuple[Shape, ...] = (
    ((0,), 3),
    ((0, 0), 2),
    ((0, 0, 0), 2),
    ((0, 0, 1), 2),
    ((0, 0, 0, 0), 1),
    ((1, 0, 0, 0, 0), 2),
)
SCOPES = {
    "2x30": Scope(2, prompts_up_to(4)),
    "3x6": Scope(3, SIX_SHAPES),
    "2x14-abort": Scope(2, prompts_up_to(3), aborts=True),
    "3x30": Scope(3, prompts_up_to(4)),
    "4x6": Scope(4, SIX_SHAPES),
}
DEFAULT_SCOPES = ("2x30", "3x6", "2x14-abort")


def small_config(policy: str, **options: Any) -> KernelConfig:  # noqa: ANN401
    """Four blocks of two tokens, two seats, a budget of four."""
    sizes = {
        "num_blocks": 4,
        "block_size": 2,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 4,
        "max_model_len": 16,
    }
    return KernelConfig(policy=policy, **{**sizes, **options})


class _ForcedFollower(Follower):
    """Checks all reads like its parent and then samples what the enumeration wants."""

    forced: Sequence[int] = ()

    def execute(self) -> list[int]:
        super().execute()
        return list(self.forced)


# The tokens are not the fake model's here, so there is no sequential oracle.
_WITHOUT_ORACLE = frozenset({"E1", "E4", "K11"})


def enumerate_states(
    config: KernelConfig,
    scope: Scope,
    factory: Factory = kernel,
    with_reference: bool = True,
    by_picture: bool = False,
) -> Enumeration:
    """Visits every reachable state; every transition is checked like a step of the search.

    With `by_picture` two states that the follower cannot tell apart are one: faster, and right
    where `unlike` is 0 without it, since then the same follows from both whatever happens.

    Raises:
        LawBroken: in a state that `operations` of the error's notes lead to.
    """
    began = time.perf_counter()
    follower = _ForcedFollower(config, VOCABULARY, suspended=_WITHOUT_ORACLE)
    twin = ReferenceScheduler(config) if with_reference else None
    start = Driver(factory(config), follower, twin, audit)
    first = _digest(_picture(start))
    follows: dict[bytes, bytes] = {}  # what follows from the first state of each picture
    seen = {_key(start, first, by_picture)}
    queue = deque([(first, pickle.dumps(start, 5))])
    count = Enumeration()
    while queue:
        here, frozen = queue.popleft()
        after: list[tuple[object, bytes]] = []
        for action, driver in _successors(frozen, scope):
            count.transitions += 1
            picture = _digest(_picture(driver))
            after.append((action, picture))
            key = _key(driver, picture, by_picture)
            if key not in seen:
                seen.add(key)
                queue.append((picture, pickle.dumps(driver, 5)))
        count.unlike += follows.setdefault(here, _digest(after)) != _digest(after)
    count.states, count.pictures = len(seen), len(follows)
    count.seconds = time.perf_counter() - began
    return count


def _successors(frozen: bytes, scope: Scope) -> Iterator[tuple[object, Driver]]:
    """What may happen next, in one order for equal pictures, and the state after it."""
    here: Driver = pickle.loads(frozen)
    added = len(here.follower.ledger.added)
    if added < scope.requests:
        for shape in scope.shapes:
            prompt, max_tokens = shape
            driver: Driver = pickle.loads(frozen)
            stops = [1] if scope.stop else []
            spec = {"id": f"r{added}", "prompt": prompt, "max_tokens": max_tokens, "stops": stops}
            driver.apply(["add", spec])
            yield ("add", shape), driver
    if not here.target.has_work:
        here.follower.on_drain(here.target)
        return
    if scope.aborts:
        for place, request_id in enumerate(_in_order(here)):
            driver = pickle.loads(frozen)
            driver.apply(["abort", request_id])
            yield ("abort", place), driver
    plan = here.open()
    assert plan is not None
    opened = pickle.dumps(here, 5)
    doomed: list[RequestId | None] = [None]
    if scope.aborts:
        doomed += _in_order(here)
    for tokens in product(range(VOCABULARY), repeat=len(plan.sampled_ids)):
        for place, victim in enumerate(doomed):
            driver = pickle.loads(opened)
            assert isinstance(driver.follower, _ForcedFollower)
            if victim is not None:
                driver.abort(victim)
            driver.follower.forced = tokens
            driver.close()
            yield ("step", tokens, place), driver


def _in_order(driver: Driver) -> list[RequestId]:
    follower = driver.follower
    return [track.request.request_id for track in follower.running + follower.waiting]


def _digest(value: object) -> bytes:
    return blake2b(repr(value).encode(), digest_size=16).digest()


def _key(driver: Driver, picture: bytes, by_picture: bool) -> bytes:
    """The follower's picture together with all that the kernel holds."""
    if by_picture or not isinstance(driver.target, Scheduler):
        return picture
    return _digest((picture, kernel_state(driver.target)))


def _picture(driver: Driver) -> object:
    """What the follower believes: queues, tables, contents, copies, free order."""
    follower = driver.follower
    blocks = follower.blocks
    names: dict[int, int] = {}
    for track in follower.running + follower.waiting:
        for block in track.table:
            names.setdefault(block, len(names))
    for block in blocks.free:
        names.setdefault(block, len(names))
    queues = tuple(
        tuple(
            (
                track.hashes[-1],
                track.tokens,
                len(track.outputs),
                track.request.max_tokens,
                track.computed,
                track.reserved,
                track.sampled,
                track.preempted > 0,
                tuple(names[block] for block in track.table),
            )
            for track in queue
        )
        for queue in (follower.running, follower.waiting)
    )
    copies = tuple(
        sorted((key, tuple(names[block] for block in held)) for key, held in blocks.copies.items())
    )
    return len(follower.ledger.added), queues, copies, len(blocks.free)


def exhaustive_main(argv: list[str]) -> int:
    """`lockstep verify exhaustive`."""
    parser = VerbParser(
        "verify exhaustive", "Enumerates every state of the kernel for a few tiny requests."
    )
    default = " ".join(DEFAULT_SCOPES)
    parser.add_argument("scopes", nargs="*", help=f"of {', '.join(SCOPES)} (default: {default})")
    parser.option("by_picture")
    args = parser.parse(argv)
    for name in args.scopes:
        if name not in SCOPES:
            raise ConfigError("scope", name, one_of(name, SCOPES))
    for name in args.scopes or DEFAULT_SCOPES:
        for policy in ("mixed", "prefill_first"):
            count = enumerate_states(small_config(policy), SCOPES[name], by_picture=args.by_picture)
            print(
                f"{name} {policy}: {count.states} states ({count.pictures} for the follower, "
                f"{count.unlike} of them unlike), {count.transitions} transitions, "
                f"{count.seconds:.1f} s",
                flush=True,
            )
    return 0
