"""The deltas of one request on their way from a body to the response that awaits them."""

from __future__ import annotations

import asyncio

from engine.server.messages import Delta


class DeltaStream:
    """An async iterator over lists of deltas; ends after the one with a finish reason.

    `put` comes from the event loop's own thread. A reader that is late gets all that has come
    meanwhile at once, so it falls no further behind.
    """

    __slots__ = ("_ended", "_pending", "_waiter")

    def __init__(self) -> None:
        self._pending: list[Delta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False

    def put(self, delta: Delta) -> None:
        """Hands over what a step gave."""
        self._pending.append(delta)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> list[Delta]:
        if self._ended:
            raise StopAsyncIteration
        while not self._pending:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        deltas, self._pending = self._pending, []
        self._ended = deltas[-1].finish_reason is not None
        return deltas
