"""A body without a model, and a server over it on a real port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

from engine.core.errors import RequestRejected
from engine.server.delta_stream import DeltaStream
from engine.server.messages import Delta, StepStats, TokenLogprob
from engine.server.protocol import BodyState, ModelInfo

VOCAB = 300


class ByteTokenizer:
    """One token per byte of UTF-8."""

    clean_up_tokenization_spaces = False

    def encode(self, text, *, add_special_tokens):
        return list(text.encode())

    def decode(self, token_ids, *, skip_special_tokens):
        return bytes(one for one in token_ids if one < 256).decode(errors="replace")

    def apply_chat_template(self, conversation, *, add_generation_prompt, tokenize, **options):
        return "".join(f"<{one['role']}>{one['content']}\n" for one in conversation)


class EchoBody:
    """Answers every prompt with its own tokens, one per step, again and again up to max_tokens."""

    def __init__(self, step_s=0.0, max_model_len=2000, max_num_seqs=4):
        self.info = ModelInfo(
            model="echo",
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            max_num_seqs=max_num_seqs,
            block_size=16,
            num_blocks=100,
        )
        self.tokenizer = ByteTokenizer()
        self.on_step = None
        self.state = BodyState.READY
        self.failure = None
        self.running = {}
        self.aborted = []
        self._step_s = step_s
        self._died = asyncio.Event()

    async def start(self):
        pass

    def check(self, request):
        length = len(request.prompt_token_ids)
        if not 1 <= length < self.info.max_model_len:
            raise RequestRejected(request.request_id, "prompt_too_long", f"{length} tokens")

    def generate(self, request):
        stream = DeltaStream()
        task = asyncio.create_task(self._run(request, stream))
        self.running[request.request_id] = task
        return stream

    async def _run(self, request, stream):
        room = self.info.max_model_len - len(request.prompt_token_ids)
        count = min(request.max_tokens or room, room)
        for place in range(count):
            await asyncio.sleep(self._step_s)
            token_id = request.prompt_token_ids[place % len(request.prompt_token_ids)]
            now = time.perf_counter_ns()
            one = [TokenLogprob(token_id, -0.5, 1), TokenLogprob(1, -1.0, 2)]
            is_last = place == count - 1
            if is_last:
                self.running.pop(request.request_id, None)
            stream.put(
                Delta(
                    token_ids=[token_id],
                    time_ns=now,
                    logprobs=None if request.logprobs is None else [one],
                    scheduled_ns=None if place else now,
                    finish_reason="length" if is_last else None,
                )
            )
            if self.on_step is not None:
                self.on_step(
                    StepStats(
                        engine=0,
                        num_running=len(self.running),
                        num_waiting=0,
                        kv_cache_usage=0.0,
                        num_step_tokens=1,
                        num_generation_tokens=1,
                    )
                )

    def abort(self, request_id):
        task = self.running.pop(request_id, None)
        if task is not None:
            task.cancel()
            self.aborted.append(request_id)

    async def wait_for_death(self):
        await self._died.wait()

    def die(self, why):
        self.state, self.failure = BodyState.DEAD, why
        self._died.set()

    async def sleep(self, level=1):
        self.state = BodyState.SLEEPING

    async def wake(self):
        self.state = BodyState.READY

    async def reset_prefix_cache(self):
        return True

    async def close(self):
        for request_id in [*self.running]:
            self.abort(request_id)


@contextlib.asynccontextmanager
async def client_of(body, **options):
    """An httpx client that talks to a server over `body`, without a socket."""
    import httpx

    from engine.server.app import build_app
    from engine.server.options import ServerOptions
    from engine.server.state import ServerState

    state = ServerState(body, ServerOptions(**options))
    transport = httpx.ASGITransport(build_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        client.server = state
        yield client


class SocketServer:
    """A server over `body` on a real port, in a thread of the test's process."""

    def __init__(self, make_body=EchoBody, **options):
        from engine.server.options import ServerOptions

        self._make_body = make_body
        self.options = ServerOptions(port=0, **options)
        self._is_ready = threading.Event()

    def __enter__(self):
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._is_ready.wait(20)
        return self

    def __exit__(self, *error):
        self.loop.call_soon_threadsafe(setattr, self._listener, "should_exit", True)
        self._thread.join()

    async def _serve(self):
        from engine.server.run import listening_socket, make_listener
        from engine.server.state import ServerState

        self.loop = asyncio.get_running_loop()
        self.body = self._make_body()
        self.state = ServerState(self.body, self.options)
        self._listener = make_listener(self.state)
        with listening_socket(self.options) as sock:
            self.port = sock.getsockname()[1]
            self.url = f"http://127.0.0.1:{self.port}"
            serving = asyncio.create_task(self._listener.serve([sock]))
            while not self._listener.started:
                await asyncio.sleep(0.01)
            self._is_ready.set()
            await serving

    def connect(self, **options):
        """A plain connection to it."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        for option, value in options.items():
            sock.setsockopt(socket.SOL_SOCKET, getattr(socket, option), value)
        return sock

    def talk(self, data):
        """What it answers to some bytes until it closes the connection."""
        with self.connect() as sock:
            sock.sendall(data)
            found = b""
            while part := sock.recv(65536):
                found += part
            return found

    def wait_for(self, condition, timeout_s=10):
        """Waits until something becomes true."""
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, "it did not come true"
            time.sleep(0.01)
