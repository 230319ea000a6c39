"""One HTTP connection: uvicorn's protocol, with bounds on the head of a request.

Uvicorn bounds neither the time nor the size of what a client sends before its headers are over.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from engine.server.errors import ApiError

LONGEST_HEAD_BYTES = 64 * 1024
_LINGER_S = 1.0


class BoundedProtocol(HttpToolsProtocol):
    """Closes connections that dawdle over a head, or send too long a one."""

    head_timeout_s = 60.0
    max_connections = 8192
    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for a request."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(ApiError(503, "too many connections"))
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops waiting."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Counts what belongs to a head."""
        if self._head_timer is not None:
            self._head_bytes += len(data)
        if self._is_refused or self.transport.is_closing():
            return
        super().data_received(data)
        if self._head_timer is not None and self._head_bytes > LONGEST_HEAD_BYTES:
            self._refuse(ApiError(431, "the headers are too long"))

    def on_message_begin(self) -> None:
        """A further request on this connection."""
        super().on_message_begin()
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        """The head is over."""
        self._stop_waiting()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets the same shape of error as everything else."""
        self._refuse(ApiError(400, msg))

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._too_slow)

    def _stop_waiting(self) -> None:
        timer, self._head_timer = self._head_timer, None
        if timer is not None:
            timer.cancel()

    def _too_slow(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self._refuse(ApiError(408, "the headers of the request took too long"))

    def _refuse(self, error: ApiError) -> None:
        self._stop_waiting()
        self._is_refused = True
        content = bytes(error.response().body)
        lines = (
            f"HTTP/1.1 {error.status} Refused",
            "content-type: application/json",
            f"content-length: {len(content)}",
            "connection: close",
        )
        self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
        # What is still on its way is read and dropped: a socket that is closed with unread bytes
        # in it takes the answer back.
        self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)


def bounded_protocol(head_timeout_s: float, max_connections: int) -> type[BoundedProtocol]:
    """The protocol class of a server with these limits."""
    limits = {"head_timeout_s": head_timeout_s, "max_connections": max_connections}
    return type("ServerProtocol", (BoundedProtocol,), limits)
