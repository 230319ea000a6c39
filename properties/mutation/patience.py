"""The copy's conftest: limits each test's processor time, so that an endless mutant costs seconds.

Mutmut's own limit is one for all tests of a mutant together, and grows with each of them.
"""

from __future__ import annotations

import signal
from collections.abc import Generator
from types import FrameType

import pytest

LIMIT_S = 5.0  # the slowest of these tests takes about 1 s


class NeverEnds(Exception):
    """A test used up its processor time."""


def _give_up(number: int, frame: FrameType | None) -> None:
    raise NeverEnds(f"after {LIMIT_S} s of processor time")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Runs the test with the timer on."""
    signal.signal(signal.SIGVTALRM, _give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
