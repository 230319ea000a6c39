"""What operators ask: health, models, version, metrics, sleep."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.server.errors import ApiError
from engine.server.protocol import BodyState
from engine.server.state import ServerState
from engine.server.version import package_version


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


async def health(request: Request) -> Response:
    """200 while the body lives: the probe of a supervisor that would start the process anew."""
    state: ServerState = request.app.state.server
    if state.body.state is BodyState.DEAD:
        raise ApiError(503, f"the engine is dead: {state.body.failure}")
    return Response(status_code=200)


async def ready(request: Request) -> Response:
    """200 while new requests are taken: the probe of a load balancer."""
    state: ServerState = request.app.state.server
    state.check_available()
    if state.body.state is not BodyState.READY:
        raise ApiError(503, f"the engine is {state.body.state}")
    return Response(status_code=200)


async def models(request: Request) -> Response:
    """The served model under its names."""
    state: ServerState = request.app.state.server
    return _json({"object": "list", "data": [_card(state, name) for name in state.model_names]})


async def model(request: Request) -> Response:
    """One name of the served model."""
    state: ServerState = request.app.state.server
    return _json(_card(state, state.check_model(request.path_params["name"])))


def _card(state: ServerState, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "lockstep",
        "root": state.body.info.model,
        "parent": None,
        "max_model_len": state.body.info.max_model_len,
    }


async def version(request: Request) -> Response:
    """The version of Lockstep, and which body computes."""
    state: ServerState = request.app.state.server
    return _json({"version": package_version(), "body": state.body.info.body})


async def metrics(request: Request) -> Response:
    """All numbers, for Prometheus."""
    state: ServerState = request.app.state.server
    kind = "text/plain; version=0.0.4; charset=utf-8"
    return Response(state.metrics.text(), headers={"Content-Type": kind})


async def sleep(request: Request) -> Response:
    """Gives memory back until `wake_up`."""
    state: ServerState = request.app.state.server
    level = request.query_params.get("level", "1")
    if level not in ("1", "2"):
        raise ApiError(400, "level must be 1 or 2", "level")
    await state.body.sleep(int(level))
    return Response(status_code=200)


async def wake_up(request: Request) -> Response:
    """Undoes `sleep`."""
    state: ServerState = request.app.state.server
    await state.body.wake()
    return Response(status_code=200)


async def is_sleeping(request: Request) -> Response:
    """Whether the body sleeps."""
    state: ServerState = request.app.state.server
    return _json({"is_sleeping": state.body.state is BodyState.SLEEPING})


async def reset_prefix_cache(request: Request) -> Response:
    """Forgets cached prefixes."""
    state: ServerState = request.app.state.server
    if not await state.body.reset_prefix_cache():
        raise ApiError(409, "the prefix cache is in use")
    return Response(status_code=200)
