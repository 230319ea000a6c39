"""The application: endpoints, what stands before them, and how their errors are written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from engine.server.errors import ApiError
from engine.server.middleware import Gate
from engine.server.routes import operations
from engine.server.routes.chat import chat_completions
from engine.server.routes.completions import completions
from engine.server.routes.tokens import detokenize, tokenize
from engine.server.schemas.chat import ChatRequest
from engine.server.schemas.completion import CompletionRequest
from engine.server.schemas.tokens import DetokenizeRequest, TokenizeRequest
from engine.server.state import ServerState
from engine.server.version import package_version

Endpoint = Callable[[Request], Awaitable[Response]]

_POSTS: tuple[tuple[str, Endpoint, type[BaseModel] | None], ...] = (
    ("/v1/completions", completions, CompletionRequest),
    ("/v1/chat/completions", chat_completions, ChatRequest),
    ("/tokenize", tokenize, TokenizeRequest),
    ("/detokenize", detokenize, DetokenizeRequest),
    ("/sleep", operations.sleep, None),
    ("/wake_up", operations.wake_up, None),
    ("/reset_prefix_cache", operations.reset_prefix_cache, None),
)
_GETS: tuple[tuple[str, Endpoint], ...] = (
    ("/v1/models", operations.models),
    ("/v1/models/{name:path}", operations.model),
    ("/health", operations.health),
    ("/health/ready", operations.ready),
    ("/ping", operations.health),
    ("/version", operations.version),
    ("/metrics", operations.metrics),
    ("/is_sleeping", operations.is_sleeping),
)
_NAME: dict[str, Any] = {
    "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
}


def build_app(state: ServerState) -> FastAPI:
    """The ASGI application of one server."""
    app = FastAPI(title="Lockstep", version=package_version(), docs_url=None, redoc_url=None)
    app.state.server = state
    for path, endpoint, schema in _POSTS:
        extra = None if schema is None else _body_of(schema)
        app.add_api_route(
            path, endpoint, methods=["POST"], openapi_extra=extra, response_model=None
        )
    for path, endpoint in _GETS:
        extra = _NAME if "{name" in path else None
        app.add_api_route(path, endpoint, methods=["GET"], openapi_extra=extra, response_model=None)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_middleware(Gate, options=state.options)
    _describe_bodies(app)
    return app


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    """Paths and methods that are none."""
    assert isinstance(error, HTTPException)
    message = "no such path" if error.status_code == 404 else str(error.detail)
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


def _body_of(schema: type[BaseModel]) -> dict[str, Any]:
    """The part of the OpenAPI document that describes a body."""
    reference = {"$ref": f"#/components/schemas/{schema.__name__}"}
    content = {"application/json": {"schema": reference}}
    return {"requestBody": {"required": True, "content": content}}


def _describe_bodies(app: FastAPI) -> None:
    """Adds the schemas of bodies to the OpenAPI document: the routes read their bodies themselves,
    since FastAPI's reader bounds neither size nor nesting."""
    schemas = [(schema, "validation") for _, _, schema in _POSTS if schema is not None]
    _, definitions = models_json_schema(
        schemas,  # type: ignore[arg-type]
        ref_template="#/components/schemas/{model}",
    )
    document = app.openapi()
    document.setdefault("components", {})["schemas"] = definitions["$defs"]
