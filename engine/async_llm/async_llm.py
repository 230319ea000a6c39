"""`AsyncLLM`: the front end's end of the engine, and a body of the server."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import socket
from collections.abc import Callable
from dataclasses import fields
from multiprocessing.process import BaseProcess

from engine.async_llm.engine_process import process_main
from engine.async_llm.wire import (
    Abort,
    Add,
    Begin,
    Close,
    Dead,
    End,
    FrameReader,
    FromEngine,
    Outputs,
    Ready,
    StartFailed,
    Stats,
    WirePlace,
    frame,
    ids_to_bytes,
)
from engine.core.config import KernelConfig
from engine.core.errors import ConfigError, InputError, LockstepError, RequestRejected
from engine.core.lifecycle import check_request
from engine.core.request import Request
from engine.core.tokens import Prompt
from engine.kv_events.options import KvEventsOptions
from engine.options import EngineOptions
from engine.sampling_params import SamplingParams
from engine.server.delta_stream import DeltaStream
from engine.server.messages import Delta, GenerateRequest, PlaceLogprobs, StepStats, TokenLogprob
from engine.server.protocol import BodyState, ModelInfo
from engine.text.tokenizer import Tokenizer, load_tokenizer

# How long the engine's process may take to end after it was told to.
_CLOSE_TIMEOUT_S = 20.0
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens"),
    *("ignore_eos", "logprobs", "prompt_logprobs"),
)


class EngineDied(LockstepError):
    """The engine's process has ended by itself."""


class AsyncLLM:
    """An engine in a process of its own; the calls are those of `engine.server.protocol.Body`."""

    info: ModelInfo

    def __init__(
        self, model: str, *, kv_events: KvEventsOptions | None = None, **options: object
    ) -> None:
        self._model, self._options, self._kv_events = model, options, kv_events
        self.tokenizer: Tokenizer | None = None
        self.on_step: Callable[[StepStats], None] | None = None
        self._state = BodyState.STARTING
        self._failure: str | None = None
        self._process: BaseProcess | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._died = asyncio.Event()
        self._next_number = 0
        self._numbers: dict[str, int] = {}
        self._open: dict[int, _Open] = {}

    @property
    def state(self) -> BodyState:
        """What it can do right now."""
        return self._state

    @property
    def failure(self) -> str | None:
        """Why it is dead, in one line."""
        return self._failure

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    # Life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts the process and waits until the model is loaded.

        Raises:
            ConfigError, InputError, OutOfMemoryAtStart: as `LLM` does.
        """
        # Wrong options are refused before a process starts.
        options = EngineOptions.from_kwargs(self._model, **self._options)
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=process_main,
            args=(theirs, self._model, self._options, self._kv_events),
            name="lockstep-engine",
        )
        self._process.start()
        theirs.close()
        await self.connect(ours, options.tokenizer or options.model)

    async def connect(self, ours: socket.socket, tokenizer_folder: str) -> None:
        """Waits for the engine at the other end of a socket."""
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        transport, _ = await loop.create_unix_connection(lambda: _Wire(self), sock=ours)
        self._transport = transport
        self.tokenizer, ready = await asyncio.gather(
            asyncio.to_thread(load_tokenizer, tokenizer_folder), self._ready
        )
        self._kernel = KernelConfig(**ready.kernel)  # type: ignore[arg-type]
        self._length_cause = ready.length_cause
        self.info = ModelInfo(
            model=self._model,
            max_model_len=self._kernel.max_model_len,
            vocab_size=ready.vocab_size,
            max_num_seqs=self._kernel.max_num_seqs,
            block_size=self._kernel.block_size,
            num_blocks=self._kernel.num_blocks,
            eos_token_ids=frozenset(ready.eos_token_ids),
            facts=ready.facts,
        )
        self._state = BodyState.READY

    async def wait_for_death(self) -> None:
        """Returns when the engine has died."""
        await self._died.wait()

    async def close(self) -> None:
        """Ends the process, which completes its log."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(Close()))
        process = self._process
        if process is None:
            return
        await asyncio.to_thread(process.join, _CLOSE_TIMEOUT_S)
        if process.is_alive():
            process.kill()
            await asyncio.to_thread(process.join)
        if self._transport is not None:
            self._transport.close()

    # Requests ----------------------------------------------------------------------------------

    def check(self, request: GenerateRequest) -> None:
        """Refuses what can never run, by the limits of sampling, vocabulary and kernel."""
        if request.extra:
            name = sorted(request.extra)[0]
            raise ConfigError(name, "(given)", "is not offered by the engine, only by the twin")
        if request.priority and self._kernel.policy != "priority":
            raise ConfigError("priority", request.priority, "belongs to policy priority")
        params = _params(request)
        SamplingParams(**params)  # type: ignore[arg-type]
        prompt, vocab_size = request.prompt_token_ids, self.info.vocab_size
        if prompt and not (min(prompt) >= 0 and max(prompt) < vocab_size):
            bad = next(one for one in prompt if not 0 <= one < vocab_size)
            raise InputError(f"token id {bad} is outside the vocabulary 0..{vocab_size - 1}")
        room = max(1, self._kernel.max_model_len - len(prompt))
        max_tokens = room if request.max_tokens is None else request.max_tokens
        kernel_request = Request(
            request.request_id, Prompt(prompt), max_tokens, min_tokens=request.min_tokens
        )
        try:
            check_request(self._kernel, kernel_request, ())
        except RequestRejected as error:
            if error.reason != "prompt_too_long":
                raise
            detail = f"{error.detail}: {self._length_cause}"
            raise RequestRejected(error.request_id, error.reason, detail) from None

    def generate(self, request: GenerateRequest) -> DeltaStream:
        """Sends the request to the engine."""
        stream = DeltaStream()
        number = self._next_number
        self._next_number += 1
        self._numbers[request.request_id] = number
        self._open[number] = _Open(request.request_id, stream)
        if self._state is BodyState.DEAD:
            self._end_all()
            return stream
        ids = ids_to_bytes(request.prompt_token_ids)
        self._write(Add(number, ids, request.arrival_ns, _params(request), request.priority))
        return stream

    def abort(self, request_id: str) -> None:
        """Ends a request."""
        number = self._numbers.pop(request_id, None)
        if number is not None and self._open.pop(number, None) is not None:
            self._write(Abort([number]))

    async def sleep(self, level: int = 1) -> None:
        """Refused: the engine cannot give its memory back."""
        raise ConfigError("sleep", level, "is offered by the simulated body only")

    async def wake(self) -> None:
        """Nothing: it does not sleep."""

    async def reset_prefix_cache(self) -> bool:
        """Refused: the kernel has no such call."""
        raise ConfigError("reset_prefix_cache", True, "is not offered by this body")

    def _write(self, message: Add | Abort) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    # What the engine says ----------------------------------------------------------------------

    def take(self, message: FromEngine) -> None:
        """Handles one message of the engine's."""
        if isinstance(message, Outputs):
            self._take_outputs(message)
        elif isinstance(message, Dead):
            self._die(message.cause)
        elif self._ready is not None and not self._ready.done():
            if isinstance(message, Ready):
                self._ready.set_result(message)
            else:
                assert isinstance(message, StartFailed)
                self._ready.set_exception(pickle.loads(message.error))

    def lose(self) -> None:
        """The socket was closed from the other side."""
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineDied("the engine's process ended while it started"))
        elif self._state is not BodyState.DEAD:
            self._die("its process has ended")

    def _die(self, cause: str) -> None:
        self._state, self._failure = BodyState.DEAD, " ".join(cause.split())
        self._end_all()
        self._died.set()

    def _end_all(self) -> None:
        """Tells everybody who waits."""
        error = f"the engine is dead: {self._failure}"
        for waiting in self._open.values():
            waiting.stream.put(Delta(token_ids=(), time_ns=0, finish_reason="error", error=error))
        self._open.clear()
        self._numbers.clear()

    def _take_outputs(self, outputs: Outputs) -> None:
        begins = {begin.number: begin for begin in outputs.begins}
        ends = {end.number: end for end in outputs.ends}
        if outputs.stats is not None and self.on_step is not None:
            self.on_step(_stats(outputs.stats, outputs.time_ns))
        places = outputs.logprobs or [None] * len(outputs.numbers)
        for number, token_id, place in zip(outputs.numbers, outputs.token_ids, places, strict=True):
            waiting = self._open.get(number)
            if waiting is None:
                continue  # it was aborted meanwhile
            end = ends.pop(number, None)
            # A row whose logits are NaN has no token.
            token_ids = () if end is not None and end.reason == "error" else (token_id,)
            logprobs = None if place is None or not token_ids else (_place(place),)
            delta = _delta(outputs.time_ns, token_ids, logprobs, begins.get(number), end)
            self._hand_over(number, waiting, delta)
        for number, end in ends.items():
            waiting = self._open.get(number)
            if waiting is not None:
                self._hand_over(number, waiting, _delta(outputs.time_ns, (), None, None, end))

    def _hand_over(self, number: int, waiting: _Open, delta: Delta) -> None:
        if delta.finish_reason is not None:
            del self._open[number]
            self._numbers.pop(waiting.request_id, None)
        waiting.stream.put(delta)


class _Open:
    """A request that has not ended."""

    __slots__ = ("request_id", "stream")

    def __init__(self, request_id: str, stream: DeltaStream) -> None:
        self.request_id, self.stream = request_id, stream


class _Wire(asyncio.Protocol):
    """The bytes of the socket, as messages."""

    def __init__(self, owner: AsyncLLM) -> None:
        self._owner = owner
        self._reader = FrameReader(FromEngine)

    def data_received(self, data: bytes) -> None:
        """Hands over whole messages."""
        for message in self._reader.feed(data):
            self._owner.take(message)  # type: ignore[arg-type]

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine has closed its end."""
        self._owner.lose()


def _params(request: GenerateRequest) -> dict[str, object]:
    """Arguments of `SamplingParams`: text is the front end's affair."""
    params: dict[str, object] = {name: getattr(request, name) for name in _SAMPLING}
    params["stop_token_ids"] = tuple(request.stop_token_ids)
    params["detokenize"] = False
    return params


def _place(place: WirePlace) -> PlaceLogprobs:
    return [TokenLogprob(*one) for one in place]


def _delta(
    time_ns: int,
    token_ids: tuple[int, ...],
    logprobs: tuple[PlaceLogprobs, ...] | None,
    begin: Begin | None,
    end: End | None,
) -> Delta:
    if begin is None and end is None:
        return Delta(token_ids=token_ids, time_ns=time_ns, logprobs=logprobs)
    places = None if begin is None else begin.prompt_logprobs
    return Delta(
        token_ids=token_ids,
        time_ns=time_ns,
        logprobs=logprobs,
        scheduled_ns=None if begin is None else begin.scheduled_ns,
        num_cached_tokens=None if begin is None else begin.num_cached_tokens,
        prompt_logprobs=None
        if places is None
        else [None if place is None else _place(place) for place in places],
        finish_reason=None if end is None else end.reason,
        stop_reason=None if end is None else end.stop_reason,
        num_preemptions=0 if end is None else end.num_preemptions,
        error=None if end is None else end.error,
    )


_STATS = tuple(field.name for field in fields(StepStats) if field.name in Stats.__struct_fields__)


def _stats(stats: Stats, time_ns: int) -> StepStats:
    values = {name: getattr(stats, name) for name in _STATS}
    return StepStats(engine=0, time_ns=time_ns, **values)
