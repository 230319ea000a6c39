"""Exhaustive small scope: every reachable state of the real kernel for a few tiny requests.

Breadth-first search. From each state: add any of the shapes (until all requests were added), abort
any live request (if asked for, also while the step is open), or do one step with every
combination of sampled tokens, or let it fail (if asked for). With asynchronous scheduling a step is
two moves, its plan and its commit, and everything may happen between them. States are told apart
by all that the kernel holds (`kernel_state`) and by what the follower believes; only the names of
blocks and requests do not count.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
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
from properties.search.scopes import DEFAULT_SCOPES, SCOPES, VOCABULARY, Scope


@dataclass(slots=True)
class Enumeration:
    """The size of what was enumerated."""

    states: int = 0
    pictures: int = 0  # states that the follower can tell apart
    transitions: int = 0
    unlike: int = 0  # states from which other pictures follow than from their picture's first state
    seconds: float = 0.0


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
    jobs: int = 1,
) -> Enumeration:
    """Visits every reachable state; every transition is checked like a step of the search.

    With `by_picture` two states that the follower cannot tell apart are one: faster, and right
    where `unlike` is 0 without it, since then the same follows from both whatever happens. With
    `jobs` > 1 that many processes share out the states of each depth.

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
    level: list[_State] = [(first, pickle.dumps(start, 5))]
    count = Enumeration()
    while level:
        found: list[_State] = []
        for part in _expanded(level, scope, by_picture, seen, jobs):
            count.transitions += part.transitions
            for here, after in part.follows:
                count.unlike += follows.setdefault(here, after) != after
            for key, state in part.new.items():
                if key not in seen:
                    seen.add(key)
                    found.append(state)
        level = found
    count.states, count.pictures = len(seen), len(follows)
    count.seconds = time.perf_counter() - began
    return count


_State = tuple[bytes, bytes]  # its picture's digest, and the pickled driver


@dataclass(slots=True)
class _Part:
    """What follows from some states of one depth."""

    transitions: int = 0
    follows: list[tuple[bytes, bytes]] = field(default_factory=list)
    new: dict[bytes, _State] = field(default_factory=dict)


def _expanded(
    level: list[_State], scope: Scope, by_picture: bool, seen: set[bytes], jobs: int
) -> Iterator[_Part]:
    """All that follows from the states of one depth, in one part per process."""
    if jobs == 1 or len(level) < 16 * jobs:
        yield _expand(level, scope, by_picture, seen)
        return
    context = get_context("fork")  # states are handed over by not copying them
    parts: list[tuple[ForkProcess, Connection]] = []
    for job in range(jobs):
        receiver, sender = context.Pipe(duplex=False)
        work = (sender, level[job::jobs], scope, by_picture, seen)
        process = context.Process(target=_expand_and_send, args=work)
        process.start()
        sender.close()
        parts.append((process, receiver))
    for process, receiver in parts:
        part = receiver.recv()
        process.join()
        if isinstance(part, BaseException):
            raise part
        yield part


def _expand_and_send(sender: Connection, *work: Any) -> None:  # noqa: ANN401
    try:
        sender.send(_expand(*work))
    except BaseException as error:
        sender.send(AssertionError(f"{error}"))


def _expand(level: list[_State], scope: Scope, by_picture: bool, seen: set[bytes]) -> _Part:
    part = _Part()
    for here, frozen in level:
        after: list[tuple[object, bytes]] = []
        for action, driver in _successors(frozen, scope):
            part.transitions += 1
            picture = _digest(_picture(driver))
            after.append((action, picture))
            key = _key(driver, picture, by_picture)
            if key not in seen and key not in part.new:
                part.new[key] = (picture, pickle.dumps(driver, 5))
        part.follows.append((here, _digest(after)))
    return part


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
    if here.follower.config.async_scheduling:
        yield from _pipelined(here, frozen, scope)
        return
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
    if scope.discards:
        driver = pickle.loads(opened)
        driver.discard()
        yield "discard", driver
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


def _pipelined(here: Driver, frozen: bytes, scope: Scope) -> Iterator[tuple[object, Driver]]:
    """Plans and commits as moves of their own, with at most two plans open."""
    plans = [step.plan for step in here.follower.open]
    if not here.target.has_work and not plans:
        here.follower.on_drain(here.target)
        return
    if here.target.has_work and len(plans) < 2:
        driver: Driver = pickle.loads(frozen)
        driver.open()
        yield "open", driver
    if scope.aborts:
        for place, request_id in enumerate(_in_order(here)):
            driver = pickle.loads(frozen)
            driver.abort(request_id)
            yield ("abort", place), driver
    if not plans:
        return
    if scope.discards:
        driver = pickle.loads(frozen)
        driver.discard()
        yield "discard", driver
    for tokens in product(range(VOCABULARY), repeat=len(plans[0].sampled_ids)):
        driver = pickle.loads(frozen)
        assert isinstance(driver.follower, _ForcedFollower)
        driver.follower.forced = tokens
        driver.close()
        yield ("close", tokens), driver


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
    ranks = {id(track): place for place, track in enumerate(follower.running + follower.waiting)}
    in_flight = tuple(
        tuple(
            (
                ranks.get(id(track)),
                first,
                count,
                samples,
                tuple(names.get(block) for block in table),
                track.preempted - step.preemptions[place],
                track.wants_abort,
            )
            for place, (track, first, count, samples, table) in enumerate(step.entries)
        )
        for step in follower.open
    )
    return len(follower.ledger.added), queues, copies, len(blocks.free), in_flight


def exhaustive_main(argv: list[str]) -> int:
    """`lockstep verify exhaustive`."""
    parser = VerbParser(
        "verify exhaustive", "Enumerates every state of the kernel for a few tiny requests."
    )
    default = " ".join(DEFAULT_SCOPES)
    parser.add_argument("scopes", nargs="*", help=f"of {', '.join(SCOPES)} (default: {default})")
    parser.option("by_picture")
    parser.option("jobs", default=1)
    args = parser.parse(argv)
    for name in args.scopes:
        if name not in SCOPES:
            raise ConfigError("scope", name, one_of(name, SCOPES))
    for name in args.scopes or DEFAULT_SCOPES:
        scope = SCOPES[name]
        for policy in scope.policies:
            config = scope.config(policy)
            count = enumerate_states(config, scope, by_picture=args.by_picture, jobs=args.jobs)
            print(
                f"{name} {policy}: {count.states} states ({count.pictures} for the follower, "
                f"{count.unlike} of them unlike), {count.transitions} transitions, "
                f"{count.seconds:.1f} s",
                flush=True,
            )
    return 0
