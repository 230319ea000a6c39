"""The life of a server process: start, serve, drain at a signal, end with the body."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from engine.core.errors import ConfigError
from engine.server.app import build_app
from engine.server.connection import bounded_protocol
from engine.server.options import ServerOptions
from engine.server.protocol import Body
from engine.server.state import ServerState

_LOGGER = logging.getLogger("lockstep.server")
_BACKLOG = 2048
_KEEP_ALIVE_S = 60
# How long answers may take to leave after their calls have ended.
_FLUSH_S = 5


class Listener(uvicorn.Server):
    """Uvicorn without its signal handlers: a signal begins a drain, which it does not know."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone."""
        yield


def serve(body: Body, options: ServerOptions) -> int:
    """Serves until a signal or the death of the body; the exit code.

    Raises:
        ConfigError: the address cannot be had.
        LockstepError: the body cannot start.
    """
    import uvloop

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    for name in ("uvicorn", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
    sock = listening_socket(options)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_live(body, options, sock))
    finally:
        sock.close()


def listening_socket(options: ServerOptions) -> socket.socket:
    """A bound socket, before anything is loaded: a port that is taken is told at once."""
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "is no address"
        raise ConfigError("host", options.host, reason) from None
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # inherited by the connections
            timeout_ms = max(1, round(options.client_timeout_s * 1000))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError("port", options.port, error.strerror or str(error)) from None
    return sock


async def _live(body: Body, options: ServerOptions, sock: socket.socket) -> int:
    stopping, leaving = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (leaving if stopping.is_set() else stopping).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        if not await _start(body, stopping):
            return 0
        state = ServerState(body, options)
        listener = make_listener(state)
        serving = asyncio.create_task(listener.serve([sock]))
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"serving {state.model_names[0]} on http://{shown}:{port}", flush=True)
        code = await _until_the_end(state, stopping, leaving)
        listener.should_exit = True
        await serving
        return code
    finally:
        await body.close()


async def _start(body: Body, stopping: asyncio.Event) -> bool:
    """Starts the body; False where a signal came first."""
    starting = asyncio.create_task(body.start())
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.wait((starting,))
        return False
    starting.result()
    return True


def make_listener(state: ServerState) -> Listener:
    """The HTTP server of a state, for sockets that are bound already."""
    options = state.options
    config = uvicorn.Config(
        build_app(state),
        http=bounded_protocol(options.client_timeout_s, options.max_connections),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_FLUSH_S,
        backlog=_BACKLOG,
    )
    return Listener(config)


async def _until_the_end(
    state: ServerState, stopping: asyncio.Event, leaving: asyncio.Event
) -> int:
    """Waits for a signal, then for the accepted requests; the exit code."""
    dying = asyncio.create_task(state.body.wait_for_death())
    waits = {name: asyncio.create_task(event.wait()) for name, event in
             (("stopping", stopping), ("leaving", leaving))}  # fmt: skip
    idle = None
    try:
        await asyncio.wait((dying, waits["stopping"]), return_when=asyncio.FIRST_COMPLETED)
        state.is_draining = True
        idle = asyncio.create_task(state.wait_until_idle())
        if not dying.done():
            _LOGGER.info("draining %d open sequences", state.num_open)
            await asyncio.wait(
                (dying, waits["leaving"], idle),
                timeout=state.options.drain_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        if not dying.done():
            if state.num_open:
                _LOGGER.warning("%d open sequences are dropped", state.num_open)
            return 0
        # Those who wait are told before the process goes.
        await asyncio.wait((idle,), timeout=_FLUSH_S)
        print(f"lockstep: the engine is dead: {state.body.failure}", file=sys.stderr, flush=True)
        return 1
    finally:
        for task in (dying, *waits.values(), idle):
            if task is not None:
                task.cancel()
