"""Runs a call and sends its answer, whole or as events; endpoints say how a piece is written."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.server.call import Call, Choice
from engine.server.choice_text import Piece
from engine.server.errors import ApiError
from engine.server.event_stream import DONE, ClientGone, EventStream, event, unless_gone
from engine.server.schemas.fields import SamplingFields
from engine.server.usage import usage

# What no client sees: it has left. The number is nginx's, for its logs.
CLIENT_CLOSED_REQUEST = 499


class Writer(Protocol):
    """How one endpoint writes pieces."""

    kind: str
    stream_kind: str

    def first_events(self, choice: Choice) -> list[dict[str, object]]:
        """Choices that a stream begins with, before anything is generated."""

    def event(self, choice: Choice, piece: Piece) -> dict[str, object] | None:
        """One choice of an event; None where there is nothing to say yet."""

    def whole(self, choice: Choice, piece: Piece) -> dict[str, object]:
        """One choice of a whole answer; `piece` is all that it got."""

    def top_level(self, choices: list[Choice]) -> dict[str, object]:
        """Further keys of a whole answer."""


class Answer:
    """One call on its way to its client."""

    def __init__(
        self, call: Call, writer: Writer, fields: SamplingFields, answer_id: str, model: str
    ) -> None:
        self._call, self._writer, self._fields = call, writer, fields
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}

    async def respond(self, request: Request, timeout_s: float) -> Response:
        """The answer, or the beginning of a stream; the call is closed in any case."""
        if self._fields.stream:
            return EventStream(self._events(), timeout_s, self._call.close)
        try:
            content = await unless_gone(request.receive, self._whole())
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        finally:
            self._call.close()
        return Response(content, media_type="application/json")

    async def _whole(self) -> bytes:
        kept: dict[int, Piece] = {}
        async for choice, piece in self._call.pieces():
            if piece.finish_reason == "error":
                raise ApiError(500, piece.error or "the request failed")
            if choice.index in kept:
                kept[choice.index].extend(piece)
            else:
                kept[choice.index] = piece
        choices = self._call.choices
        answer = {
            **self._head,
            "object": self._writer.kind,
            "choices": [self._writer.whole(choice, kept[choice.index]) for choice in choices],
            "usage": usage(choices, self._fields.n),
            **self._writer.top_level(choices),
        }
        return msgspec.json.encode(answer)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        options = self._fields.stream_options
        counts = options is not None and options.continuous_usage_stats
        head = {**self._head, "object": self._writer.stream_kind}
        for choice in self._call.choices:
            for first in self._writer.first_events(choice):
                yield event({**head, "choices": [first]})
        async for choice, piece in self._call.pieces():
            if piece.finish_reason == "error":
                error = ApiError(500, piece.error or "the request failed")
                yield event(error.body())
                break
            content = self._writer.event(choice, piece)
            if content is None:
                continue
            message: dict[str, object] = {**head, "choices": [content]}
            if piece.finish_reason is not None and choice.extra:
                message.update(choice.extra)
            if counts:
                message["usage"] = usage([choice], 1)
            yield event(message)
        if options is not None and options.include_usage:
            total = usage(self._call.choices, self._fields.n)
            yield event({**head, "choices": [], "usage": total})
        yield DONE
