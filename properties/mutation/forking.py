"""Runs a suite against many mutants: it is imported once, then one fork per mutant, fastest first.

A plugin of pytest that takes the place of its loop, so that fixtures and parameters work as ever.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType

import pytest

from properties.mutation.planting import Mutant, plant

SURVIVED = "survived"
_MEMORY = 4 << 30


class NeverEnds(BaseException):
    """A test used up its processor time; no `except Exception` of a mutant swallows that."""


def _give_up(number: int, frame: FrameType | None) -> None:
    raise NeverEnds


@dataclass(frozen=True, slots=True)
class Judgement:
    """What became of a mutant: the test that killed it, or `SURVIVED`."""

    mutant: Mutant
    by: str
    seconds: float


@dataclass
class ForkingLoop:
    """Judges every mutant by the collected tests."""

    mutants: Sequence[Mutant]
    jobs: int
    deadline: float  # by time.monotonic(); what is left then is not judged
    on_judgement: Callable[[Judgement], None]
    baseline: dict[str, float] = field(default_factory=dict)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Instead of running the tests once."""
        items = {item.nodeid: item for item in session.items}
        if session.testsfailed or not items:
            raise pytest.UsageError("the suite cannot be collected")
        self.baseline = json.loads(_in_child(lambda: _measured(session)))
        broken = [name for name in items if name not in self.baseline]
        if broken:
            raise pytest.UsageError(f"fails or is skipped without a mutant: {broken}")
        ordered = sorted(items, key=self.baseline.__getitem__)
        limits = [(items[name], 1.0 + 8 * self.baseline[name]) for name in ordered]
        for judgement in _forked(self.mutants, self.jobs, self.deadline, session, limits):
            self.on_judgement(judgement)
        return True


def _measured(session: pytest.Session) -> str:
    """Seconds of every test that passes, in this process."""
    passed = {}
    for item in session.items:
        begin = time.process_time()
        if _passes(session, item, 600.0):
            passed[item.nodeid] = time.process_time() - begin
    return json.dumps(passed)


def _passes(session: pytest.Session, item: pytest.Item, limit_s: float) -> bool:
    failed = session.testsfailed
    signal.signal(signal.SIGVTALRM, _give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    try:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
    except NeverEnds:
        return False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return session.testsfailed == failed


Limits = Sequence[tuple[pytest.Item, float]]


def _first_killer(session: pytest.Session, mutant: Mutant, limits: Limits) -> str:
    plant(mutant)
    for item, limit_s in limits:
        if not _passes(session, item, limit_s):
            return item.nodeid
    return SURVIVED


def _start(work: Callable[[], str]) -> tuple[int, int]:
    """A child that does the work and writes its result into a pipe."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.write(writing, work().encode())
    finally:
        os._exit(0)  # also where the mutant has broken Python's own way out


def _result(reading: int) -> str:
    with os.fdopen(reading, "rb") as pipe:
        return pipe.read().decode()


def _in_child(work: Callable[[], str]) -> str:
    pid, reading = _start(work)
    found = _result(reading)
    os.waitpid(pid, 0)
    return found


def _forked(
    mutants: Iterable[Mutant],
    jobs: int,
    deadline: float,
    session: pytest.Session,
    limits: Limits,
) -> Iterator[Judgement]:
    waiting = iter(mutants)
    running: dict[int, tuple[Mutant, int, float]] = {}
    longest = 60.0 + sum([limit for _, limit in limits])
    while True:
        while len(running) < jobs and time.monotonic() < deadline:
            mutant = next(waiting, None)
            if mutant is None:
                break
            pid, reading = _start(lambda mutant=mutant: _first_killer(session, mutant, limits))  # type: ignore[misc]
            running[pid] = (mutant, reading, time.monotonic())
        if not running:
            return
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if not pid:
            for child, (_, _, since) in running.items():
                if time.monotonic() - since > longest:
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
            continue
        mutant, reading, since = running.pop(pid)
        by = _result(reading) or "the process ended"
        yield Judgement(mutant, by, time.monotonic() - since)
