"""The twin as a body behind the HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

from engine.core import ConfigError, Prompt, Request
from engine.core.lifecycle import check_request
from engine.kv_events.options import KvEventsOptions
from engine.kv_events.publisher import KvPublisher
from engine.server.delta_stream import DeltaStream
from engine.server.messages import Delta, GenerateRequest, StepStats
from engine.server.protocol import BodyState, ModelInfo
from engine.steplog.api import StepLogWriter
from engine.text.tokenizer import Tokenizer
from sim.cluster.clock import Clock
from sim.cluster.router import make_router
from sim.run.deployment import Deployment, Parts, build
from sim.twin.answers import AnswerMaker
from sim.twin.cluster import TwinCluster
from sim.twin.options import TwinOptions
from sim.twin.pacing import Pace
from sim.twin.tokens import PieceTokenizer

_KNOWN_EXTRAS = ("cache_salt",)


class Twin:
    """`engine.server.protocol.Body` over simulated replicas that keep up with the wall clock.

    Raises:
        ConfigError, InputError: the deployment cannot be simulated.
    """

    def __init__(
        self,
        deployment: Deployment,
        options: TwinOptions,
        tokenizer: Tokenizer | None = None,
        log: StepLogWriter | None = None,
        parts: Parts | None = None,
        kv_events: KvEventsOptions | None = None,
    ) -> None:
        for option in ("prefill_replicas", "decode_replicas", "host_tier_gb"):
            value = getattr(deployment, option)
            if value:
                reason = "is simulated by sim run alone: a twin's replicas are whole, with one pool"
                raise ConfigError(option, value, reason)
        options.faults.check(deployment.replicas)
        self._deployment, self._options, self._log = deployment, options, log
        self._parts = parts = parts or build(deployment, options.seed)
        known = tokenizer or PieceTokenizer(parts.model.vocab_size)
        self.tokenizer: Tokenizer | None = known
        self.on_step: Callable[[StepStats], None] | None = None
        self._state, self._failure = BodyState.STARTING, ""
        self._died = asyncio.Event()
        self._streams: dict[str, DeltaStream] = {}
        self._answers = AnswerMaker(known, parts.model.vocab_size, options.answers)
        self.info = self._model_info()
        self._random = Random(options.seed)
        self.pace = Pace(Clock(), options.speed)
        self._cluster = self._make_cluster()
        self._kv_events, self._publishers = kv_events, list[KvPublisher]()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def state(self) -> BodyState:
        """What it can do right now."""
        return self._state

    @property
    def failure(self) -> str | None:
        """Why it is dead, in one line."""
        return self._failure or None

    @property
    def lag_text(self) -> str:
        """How far it was behind the clock, in words."""
        return f"at most {self.pace.max_lag_ns / 1e6:.1f} ms behind the clock"

    def describe(self) -> str:
        """What is simulated and how far to trust its times, in one line."""
        parts, kernel = self._parts, self._parts.kernel
        mode = "asynchronous" if kernel.async_scheduling else "synchronous"
        return (
            f"{len(parts.costs)} x {parts.model.name} on {parts.hardware.name}, {kernel.policy},"
            f" {mode}, {kernel.num_blocks:,} KV blocks of {kernel.block_size};"
            f" {parts.trust.error_class}"
        )

    async def start(self) -> None:
        """Starts the clock; ready after the start-up duration that was asked for."""
        if self._kv_events is not None:
            for server in self._cluster.servers:
                publisher = KvPublisher(self._kv_events, server.scheduler, server.index)
                self._publishers.append(publisher)
        self.pace.start()
        self._tasks.append(asyncio.create_task(self._run()))
        if self._options.startup_duration_s:
            self._tasks.append(asyncio.create_task(self._become_ready()))
        else:
            self._state = BodyState.READY

    def check(self, request: GenerateRequest) -> None:
        """Refuses what can never run; nothing has changed.

        Raises:
            ConfigError, RequestRejected: what is wrong, and the limit.
        """
        for name, value in request.extra.items():
            if name not in _KNOWN_EXTRAS:
                known = f"must be one of {', '.join(_KNOWN_EXTRAS)} for the simulated engine"
                raise ConfigError("field", f"{name}={str(value)[:60]}", known)
        kernel, prompt = self._parts.kernel, Prompt(request.prompt_token_ids)
        room = max(1, kernel.max_model_len - len(prompt))
        max_tokens = room if request.max_tokens is None else min(room, request.max_tokens)
        check_request(kernel, Request(request.request_id, prompt, max_tokens), ())
        largest = max(request.prompt_token_ids)  # not empty, as the kernel has just checked
        if largest >= self.info.vocab_size:
            limit = f"must be below the vocabulary's size {self.info.vocab_size}"
            raise ConfigError("prompt", largest, limit)

    def generate(self, request: GenerateRequest) -> DeltaStream:
        """Begins a request that `check` has accepted."""
        stream = self._streams[request.request_id] = DeltaStream()
        share = self._options.faults.error_rate
        goes_wrong = bool(share) and self._random.random() < share
        fails_at = self._random.randint(1, 16) if goes_wrong else None
        self._cluster.add(request, self._answers, fails_at)
        return stream

    def abort(self, request_id: str) -> None:
        """Ends a request; no delta follows."""
        if self._streams.pop(request_id, None) is not None:
            self._cluster.abort(request_id)

    async def wait_for_death(self) -> None:
        """Returns when the body has died, and never else."""
        await self._died.wait()

    async def sleep(self, level: int = 1) -> None:
        """Simulated time stands still until `wake`; only a body that is ready can sleep."""
        if self._state is BodyState.READY:
            self.pace.stop()
            self._state = BodyState.SLEEPING

    async def wake(self) -> None:
        """Undoes `sleep`."""
        if self._state is BodyState.SLEEPING:
            self.pace.go_on()
            self._state = BodyState.READY

    async def reset_prefix_cache(self) -> bool:
        """Refused, as by the engine: the kernel has no such call."""
        raise ConfigError("reset_prefix_cache", True, "is not offered by this body")

    async def close(self) -> None:
        """Ends everything that runs; idempotent. The step log is its owner's to close."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for publisher in self._publishers:
            publisher.close()

    # Inside ---------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self.pace.run()
        except Exception as error:
            self._die(f"the simulation stopped: {type(error).__name__}: {error}")
            raise

    async def _become_ready(self) -> None:
        await asyncio.sleep(self._options.startup_duration_s)
        if self._state is BodyState.STARTING:
            self._state = BodyState.READY

    def _put(self, request_id: str, delta: Delta) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        stream.put(delta)
        if delta.finish_reason is not None:
            del self._streams[request_id]

    def _stepped(self, stats: StepStats) -> None:
        if self._publishers:
            self._publishers[stats.engine].flush()
        if self.on_step is not None:
            self.on_step(stats)

    def _die(self, why: str) -> None:
        if self._state is BodyState.DEAD:
            return
        self._state, self._failure = BodyState.DEAD, why
        now = self.pace.wall_ns(self.pace.clock.now)
        for stream in self._streams.values():
            stream.put(Delta(token_ids=(), time_ns=now, finish_reason="error", error=why))
        self._streams.clear()
        self._died.set()

    def _make_cluster(self) -> TwinCluster:
        return TwinCluster(
            self._parts,
            make_router(self._deployment.router),
            self.pace,
            self._options.faults,
            self._put,
            self._stepped,
            self._log,
            on_all_down=lambda: self._die("all replicas have failed"),
        )

    def _model_info(self) -> ModelInfo:
        parts, kernel = self._parts, self._parts.kernel
        facts = {
            "block_size": str(kernel.block_size),
            "num_gpu_blocks": str(kernel.num_blocks),
            "enable_prefix_caching": str(kernel.enable_prefix_caching),
            "cost": parts.costs[0].name,
            "trust": parts.trust.error_class,
        }
        return ModelInfo(
            model=self._deployment.model,
            max_model_len=kernel.max_model_len,
            vocab_size=parts.model.vocab_size,
            max_num_seqs=kernel.max_num_seqs,
            block_size=kernel.block_size,
            num_blocks=kernel.num_blocks,
            num_engines=len(parts.costs),
            eos_token_ids=frozenset([self._answers.end]),
            body="sim",
            facts=facts,
        )
