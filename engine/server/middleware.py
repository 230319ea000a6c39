"""What happens to every request before its endpoint sees it: id, key, limits; errors as JSON.

Plain ASGI: a layer of Starlette's `BaseHTTPMiddleware` costs a task and a queue per request.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.errors import ApiError
from engine.server.options import ServerOptions

_LOGGER = logging.getLogger("lockstep.server")
_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
# What probes and scrapers ask without a key.
_OPEN_PATHS = frozenset({"/health", "/health/ready", "/ping", "/metrics", "/version"})
_MOST_DISCARDED_BYTES = 64_000_000
_LONGEST_DISCARD_S = 2.0


class Gate:
    """Gives a request its id, checks its key and bounds the size and time of its body."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app, self._options = app, options
        self._keys = [key.encode() for key in options.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if _ID.fullmatch(given) else uuid.uuid4().hex
        scope["request_id"] = request_id
        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                message["headers"] = [
                    *message["headers"], (b"x-request-id", request_id.encode())
                ]  # fmt: skip
            await send(message)

        try:
            self._check(scope["path"], headers)
            await self._app(scope, self._bounded(receive), send_with_id)
        except ApiError as error:
            if error.status == 413:
                await self._discard(receive)
            await error.response()(scope, receive, send_with_id)
        except Exception as error:
            # The traceback has no value of the client's in it, unlike the error's own words.
            place = _place_of(error)
            _LOGGER.error("request %s failed: %s at %s", request_id, type(error).__name__, place)
            if has_begun:
                raise ConnectionAbortedError from None
            internal = ApiError(500, "the server failed; the request's id is in its log")
            await internal.response()(scope, receive, send_with_id)

    def _check(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self._keys and path not in _OPEN_PATHS:
            kind, _, key = headers.get(b"authorization", b"").partition(b" ")
            if kind.lower() != b"bearer" or not self._is_key(key.strip()):
                wanted = {"WWW-Authenticate": "Bearer"}
                raise ApiError(401, "the API key is missing or wrong", headers=wanted)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18:
            raise ApiError(400, "the header Content-Length is no number")
        if int(length) > self._options.max_body_bytes:
            raise self._too_large()

    def _is_key(self, given: bytes) -> bool:
        # Every key is compared, so that the time says nothing about them.
        return any([hmac.compare_digest(given, key) for key in self._keys])

    def _bounded(self, receive: Receive) -> Receive:
        """Reads the body within its limits; what comes behind it only says that the client left."""
        size = 0
        is_whole = False

        async def bounded() -> Message:
            nonlocal size, is_whole
            if is_whole:
                return await receive()
            try:
                async with asyncio.timeout(self._options.client_timeout_s):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, "the body of the request took too long") from None
            if message["type"] == "http.request":
                size += len(message.get("body", b""))
                is_whole = not message.get("more_body", False)
                if size > self._options.max_body_bytes:
                    raise self._too_large()
            return message

        return bounded

    async def _discard(self, receive: Receive) -> None:
        """Reads on for a little: a client that still sends when we hang up loses the answer."""
        left = _MOST_DISCARDED_BYTES
        try:
            async with asyncio.timeout(min(_LONGEST_DISCARD_S, self._options.client_timeout_s)):
                while left > 0:
                    message = await receive()
                    if message["type"] != "http.request" or not message.get("more_body"):
                        return
                    left -= len(message.get("body", b""))
        except TimeoutError:
            pass

    def _too_large(self) -> ApiError:
        limit = self._options.max_body_bytes
        close = {"Connection": "close"}
        return ApiError(413, f"the body is longer than {limit:,} bytes", headers=close)


def _place_of(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "an unknown place"
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
