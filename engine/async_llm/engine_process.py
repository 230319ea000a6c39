"""The engine's process: takes requests from the socket between steps, sends what steps give."""

from __future__ import annotations

import contextlib
import pickle
import signal
import socket
import time

from engine.async_llm.outputs import Followed, StepOutputs
from engine.async_llm.wire import (
    Abort,
    Add,
    Dead,
    End,
    EngineEnd,
    Outputs,
    Ready,
    StartFailed,
    ids_from_bytes,
)
from engine.core.errors import ConfigError, LockstepError
from engine.core.request import RequestId
from engine.kv_events.options import KvEventsOptions
from engine.kv_events.publisher import KvPublisher
from engine.llm import LLM, EngineClosed
from engine.requests.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from engine.step.loop import StepFailed

# How often an idle engine looks after its ranks.
_IDLE_CHECK_S = 1.0


def process_main(
    sock: socket.socket,
    model: str,
    options: dict[str, object],
    kv_events: KvEventsOptions | None = None,
) -> None:
    """What the process runs: it ends with its front end, however that ends."""
    # Ctrl-C and signals to a process group are the front end's affair.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise SystemExit(serve_socket(sock, model, options, kv_events))


def serve_socket(
    sock: socket.socket,
    model: str,
    options: dict[str, object],
    kv_events: KvEventsOptions | None = None,
) -> int:
    """Runs an engine until the other end of the socket closes it or goes; the exit code."""
    end = EngineEnd(sock)
    try:
        try:
            llm = LLM(model, **options)
        except LockstepError as error:
            end.send(StartFailed(pickle.dumps(error)))
            return 1
        except Exception as error:
            cause = ConfigError("model", model, f"{type(error).__name__}: {error}")
            end.send(StartFailed(pickle.dumps(cause)))
            return 1
        with llm, contextlib.ExitStack() as closing:
            events = None
            if kv_events is not None:
                try:
                    events = KvPublisher(kv_events, llm.scheduler)
                except LockstepError as error:
                    end.send(StartFailed(pickle.dumps(error)))
                    return 1
                closing.callback(events.close)
            try:
                return EngineCore(llm, end, events).run()
            except Exception as error:
                end.send(Dead(f"{type(error).__name__}: {error}"))
                raise
    finally:
        end.close()


class EngineCore:
    """The loop: messages, a step, its outputs, and again."""

    def __init__(self, llm: LLM, end: EngineEnd, events: KvPublisher | None = None) -> None:
        self._llm, self._end, self._events = llm, end, events
        self._outputs = StepOutputs(lambda: llm.scheduler, llm.origin_ns)
        self._ids: dict[int, RequestId] = {}  # by number
        self._is_closing = False
        self._has_aborted = False
        llm.on_step = self._outputs.take_step

    def run(self) -> int:
        """Until it is closed; the exit code."""
        self._end.send(_ready(self._llm))
        cause = None
        while cause is None:
            has_work = self._llm.has_unfinished_requests
            for message in self._end.receive(None if has_work else _IDLE_CHECK_S):
                self._handle(message)
            if self._is_closing or not self._end.is_open:
                return 0
            cause = self._step() if self._llm.has_unfinished_requests else self._rest()
            if self._events is not None:
                # A failed step may have cost the engine its scheduler, and all blocks with it.
                self._events.follow(self._llm.scheduler)
                self._events.flush()
        self._end.send(Dead(cause))
        return 1

    def _handle(self, message: object) -> None:
        if isinstance(message, Add):
            self._add(message)
        elif isinstance(message, Abort):
            for number in message.numbers:
                self._abort(number)
        else:
            self._is_closing = True

    def _add(self, message: Add) -> None:
        prompt = ids_from_bytes(message.prompt_token_ids)
        try:
            params = SamplingParams(**message.params)  # type: ignore[arg-type]
            priority = [message.priority] if message.priority else None
            (request_id,) = self._llm.add_requests(
                [{"prompt_token_ids": prompt}],
                [params],
                priority=priority,
                arrival_ns=message.arrival_ns,
            )
        except Exception as error:  # the front end has checked it, so this is a fault of ours
            cause = f"{type(error).__name__}: {error}"
            end = End(message.number, "error", None, 0, cause)
            now_ns = time.perf_counter_ns()
            self._end.send(Outputs(now_ns, [], [], None, [], [end], None))
            return
        self._ids[message.number] = request_id
        self._outputs.follow(request_id, Followed(message.number, prompt, params))

    def _abort(self, number: int) -> None:
        request_id = self._ids.pop(number, None)
        if request_id is None:
            return  # it has ended meanwhile
        self._outputs.forget(request_id)
        self._has_aborted = True
        with contextlib.suppress(EngineClosed):
            self._llm.cancel(request_id)

    def _step(self) -> str | None:
        """Runs a step and sends what it gave; the cause if the engine is dead."""
        cause = None
        try:
            self._send(self._llm.step())
        except StepFailed as error:
            # Those whom it concerns are told by the next call of `step`.
            if self._llm.executor.is_dead:
                cause = str(error)
        except EngineClosed as error:
            cause = str(error)
        if cause is not None:
            while self._llm.has_unfinished_requests:
                self._send(self._llm.step())
        return cause

    def _send(self, ended: list[RequestOutput]) -> None:
        self._outputs.ended(ended, time.perf_counter_ns())
        for outputs in self._outputs.drain():
            for end in outputs.ends:
                self._ids.pop(end.number, None)
            self._end.send(outputs)

    def _rest(self) -> str | None:
        """What is done while there is no work; the cause if a rank was lost meanwhile."""
        if self._has_aborted:
            self._has_aborted = False
            now_ns = time.perf_counter_ns()
            self._end.send(Outputs(now_ns, [], [], None, [], [], self._outputs.state()))
        return self._llm.executor.find_loss()


def _ready(llm: LLM) -> Ready:
    info = llm.info
    facts = {
        "cache_dtype": llm.options.kv_cache_dtype,
        "enable_prefix_caching": str(llm.options.enable_prefix_caching),
        "gpu_memory_utilization": str(llm.options.gpu_memory_utilization),
        "dtype": info.dtype,
    }
    return Ready(
        llm.scheduler.config.to_json(),
        llm.model_config.vocab_size,
        sorted(llm.model_config.eos_token_ids),
        llm.length_limit_cause,
        facts,
    )
