"""The engine's facade: prompts in, outputs out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import TracebackType

from engine.core.errors import ConfigError, LockstepError, RequestRejected
from engine.core.lifecycle import check_request
from engine.core.request import Request, RequestId
from engine.core.scheduler import Scheduler
from engine.layers.moe_config import check_expert_split
from engine.layers.sharding import check_tp_size
from engine.models.config import load_model_config
from engine.options import EngineOptions
from engine.requests.committed_step import CommittedStep
from engine.requests.live import LiveRequest
from engine.requests.outputs import RequestOutput
from engine.requests.progress import Progress
from engine.requests.prompts import (
    PromptInput,
    TokenPrompt,
    per_prompt_params,
    split_prompts,
    to_token_prompt,
)
from engine.requests.registry import RequestRegistry
from engine.requests.stream import OutputStream
from engine.sampling_params import RequestSampling, SamplingParams, request_seed
from engine.step.header import kernel_config, log_header
from engine.step.log import EngineLog
from engine.step.loop import StepFailed, StepLoop
from engine.steplog.api import StepLogWriter
from engine.text.detokenize import byte_token_ids
from engine.text.tokenizer import load_tokenizer
from engine.worker.executor import Executor, make_executor
from engine.worker.info import RunnerInfo


class EngineClosed(LockstepError):
    """The engine was closed, by `close` or by the loss of a worker."""


class LLM:
    """An engine with one model.

        with LLM("path/to/model", max_num_seqs=64) as llm:
            outputs = llm.generate(["Hello"], SamplingParams(temperature=0.0))

    Options are those of `EngineOptions`. Not for use from several threads at once. The output of
    every accepted request is handed over exactly once, by the call that it belongs to or by
    `step`, whatever fails; only `cancel` and `close` drop what is left.

    Raises:
        ConfigError: an option is unknown or impossible.
        InputError: the model folder is wrong (UnsupportedModel, WeightError).
        OutOfMemoryAtStart: the device is too small.
    """

    def __init__(self, model: str, **options: object) -> None:
        self._closed = True  # until something needs closing
        self._requests = RequestRegistry()
        self.options = EngineOptions.from_kwargs(model, **options)
        self.model_config = load_model_config(self.options.model)
        self.tokenizer = load_tokenizer(self.options.tokenizer or self.options.model)
        self._byte_ids = byte_token_ids(self.tokenizer)
        self._eos_token_ids = frozenset(self.model_config.eos_token_ids)
        size = self.options.tensor_parallel_size
        check_tp_size(self.model_config, size)
        check_expert_split(self.model_config.moe, size, self.options.expert_parallel)
        self._executor: Executor = make_executor(self.options)
        self._closed = False
        self._next_id = 0
        self.on_step: Callable[[CommittedStep], None] | None = None  # for measurements
        self._log = EngineLog(None)
        try:
            config = kernel_config(self.options, self._executor.info)
            if self.options.step_log is not None:
                header = log_header(self.options, self.model_config, self._executor.info, config)
                self._log = EngineLog(StepLogWriter(self.options.step_log, header))
            scheduler = Scheduler(config)
            self._loop = StepLoop(
                scheduler, self._executor, self._requests, self._log, self.options.debug
            )
        except BaseException:
            self.close()
            raise

    @property
    def info(self) -> RunnerInfo:
        """Sizes, memory and start-up times of this engine."""
        return self._executor.info

    @property
    def scheduler(self) -> Scheduler:
        """The kernel, for inspection only."""
        return self._loop.scheduler

    @property
    def origin_ns(self) -> int:
        """The zero of all times of this engine, by `time.perf_counter_ns`."""
        return self._loop.origin_ns

    @property
    def executor(self) -> Executor:
        """Where steps are computed, for inspection only."""
        return self._executor

    # One call for many prompts ---------------------------------------------------------------

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generates for all prompts and returns the outputs in their order.

        A prompt is text, token ids, `{"prompt": ...}`, `{"prompt_token_ids": ...}` or a list of
        chat messages. Either all prompts are accepted or none is. If the call fails, nothing of
        it stays in the engine. `priority` (lower goes first) has one number per prompt and means
        something with `policy="priority"` only.

        Raises:
            RequestRejected, InputError, ConfigError: a prompt or its parameters are wrong.
            StepFailed: computing failed; the next call works unless a worker was lost.
        """
        request_ids: list[RequestId] = []
        try:
            request_ids = self._add(prompts, sampling_params, is_kept=True, priority=priority)
            with Progress(request_ids, enabled=use_tqdm) as progress:
                waited_for = [*request_ids]
                while waited_for:
                    if waited_for[-1] in self._requests:
                        self._advance(progress)
                    else:
                        waited_for.pop()
            return self._requests.claim(request_ids)
        except BaseException:
            self._drop(request_ids)
            raise

    def chat(
        self,
        messages: Sequence[dict[str, str]] | Sequence[Sequence[dict[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generates the assistant's next message for one conversation or many."""
        return self.generate(messages, sampling_params, use_tqdm)

    def stream(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> OutputStream:
        """Yields the output so far of every request after each step, the last one `finished`.

        Requests are queued at the call; closing the iterator early aborts what is left.
        """
        request_ids: list[RequestId] = []
        try:
            request_ids = self._add(prompts, sampling_params, stream=True, is_kept=True)
            return OutputStream(self._requests, request_ids, self._advance, self._drop)
        except BaseException:
            self._drop(request_ids)
            raise

    # Step by step ----------------------------------------------------------------------------

    def add_requests(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        stream: bool = False,
        priority: Sequence[int] | None = None,
        arrival_ns: int | None = None,
    ) -> list[RequestId]:
        """Queues all prompts, or none if one of them is wrong, and returns their ids.

        `arrival_ns` is when they arrived, by `time.perf_counter_ns`; now unless given.
        """
        since = None if arrival_ns is None else arrival_ns - self.origin_ns
        return self._add(prompts, sampling_params, stream, priority=priority, arrival_ns=since)

    def _add(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        stream: bool = False,
        is_kept: bool = False,
        priority: Sequence[int] | None = None,
        arrival_ns: int | None = None,
    ) -> list[RequestId]:
        self._check_open()
        items = split_prompts(prompts)
        params = per_prompt_params(sampling_params, len(items))
        ranks = self._priorities(priority, len(items))
        config = self._loop.scheduler.config
        vocab_size = self.model_config.vocab_size
        ready: list[tuple[Request, LiveRequest]] = []
        for place, (item, param) in enumerate(zip(items, params, strict=True)):
            prompt = to_token_prompt(item, self.tokenizer, vocab_size, place)
            live = self._live_request(
                self._next_id + place, prompt, param, stream, is_kept, arrival_ns
            )
            request = live.kernel_request(config.max_model_len, ranks[place])
            self._check_request(request)
            ready.append((request, live))
        self._next_id += len(ready)
        request_ids = [request.request_id for request, _ in ready]
        try:
            for request, live in ready:
                self._loop.add(live, request)
            return request_ids
        except BaseException:
            self._drop(request_ids)
            raise

    def _priorities(self, priority: Sequence[int] | None, num_prompts: int) -> Sequence[int]:
        """One per prompt, which another policy than `priority` does not take."""
        if priority is None:
            return [0] * num_prompts
        if self._loop.scheduler.config.policy != "priority":
            raise ConfigError("priority", priority, "belongs to policy priority")
        if len(priority) != num_prompts or not all(type(rank) is int for rank in priority):
            raise ConfigError("priority", priority, f"must be {num_prompts} whole numbers")
        return priority

    def step(self) -> list[RequestOutput]:
        """Runs one step and returns the outputs of requests that have ended since the last call.

        After a call that raised, the next one returns what had ended before and by the failure.

        Raises:
            StepFailed: it could not be computed; its requests end with reason `error`.
            EngineClosed: a worker was lost, and all outputs have been handed over.
        """
        if not (self._closed and self._requests.owes):
            self._advance()
        return self._requests.take()

    def abort(self, request_id: RequestId) -> RequestOutput | None:
        """Ends a request in any state; returns its output, or None if no such request runs."""
        self._check_open()
        if request_id not in self._requests:
            return None
        self._loop.abort(request_id)
        if request_id in self._requests:
            self._settle()
        return self._requests.claim_one(request_id)

    def cancel(self, request_id: RequestId) -> None:
        """Ends a request of `add_requests` that nobody waits for: it has no output.

        Unlike `abort` it does not wait for the step under way.
        """
        self._check_open()
        running = request_id in self._requests
        self._requests.disown([request_id])
        if running:
            self._loop.abort(request_id)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether something is queued or under way, or `step` has an output to return."""
        return self._requests.owes or (not self._closed and self._loop.num_open > 0)

    # Parts -----------------------------------------------------------------------------------

    def _advance(self, progress: Progress | None = None, refill: bool = True) -> None:
        """One step; what it ends is in the registry."""
        self._check_open()
        try:
            step = self._loop.step(refill)
        except BaseException:
            if self._executor.is_dead:
                self._shut_down()
            raise
        if step is None:
            assert not self._requests.num_running, "a request runs that the kernel does not know"
            return
        if progress is not None:
            progress.count(step)
        if self.on_step is not None:
            self.on_step(step)
        if not self._requests.num_running and self._loop.num_open:
            # The step ahead holds blocks of requests that ended meanwhile until its commit; no
            # request is left that its failure could concern.
            with contextlib.suppress(StepFailed):
                self._settle()

    def _settle(self) -> None:
        """Commits the open steps without starting new ones."""
        while self._loop.num_open:
            self._advance(refill=False)

    def _drop(self, request_ids: Sequence[RequestId]) -> None:
        """Takes the requests of a failed or abandoned call out of the engine."""
        running = [name for name in request_ids if name in self._requests]
        self._requests.disown(request_ids)
        if self._closed:
            return
        for request_id in running:
            self._loop.abort(request_id)
        if running:
            with contextlib.suppress(StepFailed, EngineClosed):
                self._settle()

    def _check_request(self, request: Request) -> None:
        """Refuses what can never run; where the length is too great, says whose limit that is."""
        try:
            check_request(self._loop.scheduler.config, request, self._requests)
        except RequestRejected as error:
            if error.reason != "prompt_too_long":
                raise
            detail = f"{error.detail}: {self.length_limit_cause}"
            raise RequestRejected(error.request_id, error.reason, detail) from None

    @property
    def length_limit_cause(self) -> str:
        """Why requests cannot be longer, for those who ask for more."""
        if self.options.max_model_len is not None:
            return "the option max_model_len says so"
        if self.info.max_model_len < self.model_config.max_position_embeddings:
            return f"the KV cache holds {self.info.num_blocks * self.info.block_size} tokens"
        return self.model_config.length_limit

    def _live_request(
        self,
        number: int,
        prompt: TokenPrompt,
        params: SamplingParams,
        stream: bool,
        is_kept: bool,
        arrival_ns: int | None,
    ) -> LiveRequest:
        stops = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= self._eos_token_ids  # BUG-C48
        seed = request_seed(params, self.options.seed, number)
        sampling = RequestSampling(params, seed, len(prompt.token_ids), stops)
        now_ns = self._loop.now_ns() if arrival_ns is None else arrival_ns
        return LiveRequest(
            number, prompt, sampling, now_ns, self.tokenizer, stream, is_kept, self._byte_ids
        )

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine is closed")

    # End -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Frees devices and worker processes and completes the step log; idempotent."""
        self._shut_down()
        self._requests.clear()

    def _shut_down(self) -> None:
        """What `close` does, except that outputs can still be handed over."""
        if self._closed:
            return
        self._closed = True
        try:
            self._log.close()
        finally:
            self._executor.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
