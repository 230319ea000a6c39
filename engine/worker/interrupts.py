"""Ctrl-C, held back for as long as a message between processes is only half-way."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class DeferredInterrupt:
    """Within the block an interrupt waits for its end; a second one is obeyed at once.

    Does nothing outside the main thread, where Python delivers no signals.
    """

    def __init__(self) -> None:
        self._previous: object = None
        self._caught: FrameType | None = None
        self._is_caught = False

    def __enter__(self) -> None:
        self._is_caught = False
        self._previous = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                signal.signal(signal.SIGINT, self._hold)
                self._previous = handler

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if callable(self._previous):
            signal.signal(signal.SIGINT, self._previous)
            if self._is_caught and kind is None:
                self._previous(signal.SIGINT, self._caught)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._is_caught and callable(self._previous):
            self._previous(number, frame)
        self._is_caught, self._caught = True, frame
