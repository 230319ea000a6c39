"""The outputs of one streaming call, step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence

from engine.core.request import RequestId
from engine.requests.outputs import RequestOutput
from engine.requests.registry import RequestRegistry


class OutputStream(Iterator[RequestOutput]):
    """Runs steps while somebody iterates; closing it early aborts what is left.

    `advance` runs one step, `drop` takes requests out of the engine.
    """

    _left: Collection[RequestId] = ()

    def __init__(
        self,
        requests: RequestRegistry,
        request_ids: Sequence[RequestId],
        advance: Callable[[], None],
        drop: Callable[[Sequence[RequestId]], None],
    ) -> None:
        self._requests = requests
        self._ready: deque[RequestOutput] = deque()
        self._advance = advance
        self._drop = drop
        self._left = [*request_ids]

    def __next__(self) -> RequestOutput:
        try:
            while self._left and not self._ready:
                self._advance()
                self._collect()
        except BaseException:
            self.close()
            raise
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def _collect(self) -> None:
        """Takes over what the step gave: progress first, then what ended."""
        self._ready.extend(self._requests.progress(self._left))
        self._ready.extend(self._requests.claim([*self._left]))
        self._left = [name for name in self._left if name in self._requests]

    def close(self) -> None:
        """Aborts what is left; idempotent."""
        left, self._left = self._left, ()
        self._ready = deque()
        if left:
            self._drop([*left])

    def __del__(self) -> None:
        self.close()
