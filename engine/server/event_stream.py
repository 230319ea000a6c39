"""Answers that watch their client: server-sent events, and plain ones that a disconnect ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed its connection."""


def event(content: object) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled where the client disconnects.

    Raises:
        ClientGone: it did.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they come; `at_end` is called in any case.

    A client that leaves, or reads nothing for `timeout_s`, ends it.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        timeout_s: float,
        at_end: Callable[[], None],
    ) -> None:
        super().__init__(None, headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._timeout_s = timeout_s
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        try:
            await unless_gone(receive, self._send_all(send))
        except (ClientGone, TimeoutError, OSError):
            return
        finally:
            await self._events.aclose()
            self._at_end()

    async def _send_all(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        async for content in self._events:
            # Uvicorn waits here while the client's window is full.
            async with asyncio.timeout(self._timeout_s):
                await send({"type": "http.response.body", "body": content, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
