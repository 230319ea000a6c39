"""Errors of the HTTP API: OpenAI's shape, vLLM's types, one line of JSON each."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

from engine.core.errors import ConfigError, LockstepError, RequestRejected

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
_LONGEST_MESSAGE = 500


class ApiError(Exception):
    """An answer that is an error: its status, and what the client is told."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        """The JSON of the answer."""
        message = " ".join(str(self).split())
        if len(message) > _LONGEST_MESSAGE:
            message = message[: _LONGEST_MESSAGE - 3] + "..."
        kind = _TYPES.get(self.status, "BadRequestError")
        error = {"message": message, "type": kind, "param": self.param, "code": self.status}
        return {"error": error}

    def response(self) -> Response:
        """The whole answer."""
        content = msgspec.json.encode(self.body())
        return Response(content, self.status, self.headers, "application/json")


def of_lockstep(error: LockstepError) -> ApiError:
    """What a wrong request is told; the names of options are those of the API's fields."""
    if isinstance(error, ConfigError):
        return ApiError(400, str(error), error.option)
    if isinstance(error, RequestRejected):
        param = "max_tokens" if error.reason == "pool_too_small" else None
        return ApiError(400, error.detail, param)
    return ApiError(400, str(error))


def of_validation(error: ValidationError) -> ApiError:
    """One thing that pydantic found wrong; the client's value is not repeated."""
    found = error.errors(include_url=False, include_input=False)
    # Of the members of a union the one that was meant is the one that got furthest.
    first = max(found, key=lambda one: len(one["loc"]))
    param = first.get("ctx", {}).get("param")
    if isinstance(param, str):
        return ApiError(400, first["msg"], param)
    # Places of a union hold the names of its members, which say nothing to a client.
    names = [
        str(part)
        for part in first["loc"]
        if re.fullmatch(r"[a-z_0-9]+", str(part)) and part not in ("str", "int")
    ]
    where = ".".join(names)
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{where}: {message}" if where else message, where or None)
