"""Reading the body of a request into its schema."""

from __future__ import annotations

import uuid
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from engine.server.errors import ApiError, of_validation

Schema = TypeVar("Schema", bound=BaseModel)


async def read(request: Request, schema: type[Schema]) -> Schema:
    """The checked body.

    Raises:
        ApiError: it is no JSON, or not of this schema.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    if kind.lower() != "application/json" and not kind.lower().endswith("+json"):
        raise ApiError(415, "the body must be application/json")
    content = await request.body()
    try:
        # Pydantic's own parser bounds the nesting, unlike that of the standard library.
        return schema.model_validate_json(content)
    except ValidationError as error:
        raise of_validation(error) from None


def call_id(request: Request, prefix: str, asked: str | None) -> str:
    """The id of an answer: made from the id of the request that the client or we have given."""
    own = asked or request.scope.get("request_id") or uuid.uuid4().hex
    return f"{prefix}-{own}"
