"""The waiting queue: what every policy's queue offers, and the one in order of arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from engine.core.sequence import Sequence


class WaitingQueue(Protocol):
    """Requests that wait, in the order in which they are tried; the first one is its head."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...

    def __getitem__(self, index: int, /) -> Sequence: ...

    def add(self, sequence: Sequence, /) -> None:
        """Takes in a new request."""

    def put_back(self, sequence: Sequence, /) -> None:
        """Takes in a preempted request."""

    def popleft(self) -> Sequence:
        """Takes out the head."""

    def remove(self, sequence: Sequence, /) -> None:
        """Takes out any request."""


class FcfsQueue(deque[Sequence]):
    """First come, first served; a preempted request goes before everybody (LAW-S6)."""

    add = deque[Sequence].append
    put_back = deque[Sequence].appendleft
