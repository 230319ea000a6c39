"""The engine's facade: prompts in, outputs out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from engine.core.errors import LockstepError
from engine.core.lifecycle import check_request
from engine.core.request import Request, RequestId
from engine.core.scheduler import Scheduler
from engine.core.tokens import Prompt
from engine.layers.moe_config import check_expert_split
from engine.layers.sharding import check_tp_size
from engine.models.config import load_model_config
from engine.options import EngineOptions
from engine.requests.live import LiveRequest, RequestTable
from engine.requests.outputs import RequestOutput
from engine.requests.progress import Progress
from engine.requests.prompts import (
    PromptInput,
    load_tokenizer,
    per_prompt_params,
    split_prompts,
    to_token_prompt,
)
from engine.sampling_params import SamplingParams, request_seed
from engine.step.builder import RequestSampling, StepBuilder
from engine.step.header import kernel_config, log_header
from engine.step.loop import StepEvents, StepFailed, StepLoop
from engine.steplog.api import StepLogWriter
from engine.worker.executor import Executor, make_executor
from engine.worker.info import RunnerInfo
from engine.worker.kv_cache import table_width


class EngineClosed(LockstepError):
    """The engine was closed, by `close` or by the loss of a worker."""


class LLM:
    """An engine with one model.

        with LLM("path/to/model", max_num_seqs=64) as llm:
            outputs = llm.generate(["Hello"], SamplingParams(temperature=0.0))

    Options are those of `EngineOptions`. Not for use from several threads at once.

    Raises:
        ConfigError: an option is unknown or impossible.
        InputError: the model folder is wrong (UnsupportedModel, WeightError).
        OutOfMemoryAtStart: the device is too small.
    """

    def __init__(self, model: str, **options: object) -> None:
        self._closed = True  # until something needs closing
        self.options = EngineOptions.from_kwargs(model, **options)
        self.model_config = load_model_config(self.options.model)
        self.tokenizer = load_tokenizer(self.options.tokenizer or self.options.model)
        self._eos_token_ids = frozenset(self.model_config.eos_token_ids)
        size = self.options.tensor_parallel_size
        check_tp_size(self.model_config, size)
        check_expert_split(self.model_config.moe, size, self.options.expert_parallel)
        self._executor: Executor = make_executor(self.options)
        self._closed = False
        self._requests = RequestTable()
        self._unclaimed: list[RequestOutput] = []  # ended while another call was waiting
        self._next_id = 0
        self.on_step: Callable[[StepEvents], None] | None = None  # for measurements
        self._log: StepLogWriter | None = None
        try:
            config = kernel_config(self.options, self._executor.info)
            if self.options.step_log is not None:
                header = log_header(self.options, self.model_config, self._executor.info, config)
                self._log = StepLogWriter(self.options.step_log, header)
            self._loop = StepLoop(
                Scheduler(config),
                self._executor,
                StepBuilder(
                    config.max_num_seqs, table_width(config.max_model_len, config.block_size)
                ),
                self._log,
                self.options.debug,
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
    def executor(self) -> Executor:
        """Where steps are computed, for inspection only."""
        return self._executor

    # One call for many prompts ---------------------------------------------------------------

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generates for all prompts and returns the outputs in their order.

        A prompt is text, token ids, `{"prompt": ...}`, `{"prompt_token_ids": ...}` or a list of
        chat messages. Either all prompts are accepted or none is. If the call fails, nothing of
        it stays in the engine.

        Raises:
            RequestRejected, InputError, ConfigError: a prompt or its parameters are wrong.
            StepFailed: computing failed; the next call works unless a worker was lost.
        """
        request_ids = self.add_requests(prompts, sampling_params)
        own = frozenset(request_ids)
        done: dict[RequestId, RequestOutput] = {}
        with Progress(len(request_ids), enabled=use_tqdm) as progress:
            try:
                while len(done) < len(request_ids):
                    for output in self._step(progress):
                        if output.request_id not in own:
                            self._unclaimed.append(output)
                            continue
                        done[output.request_id] = output
                        progress.finish_request()
            except BaseException:
                self._drop(request_ids)
                raise
        return [done[request_id] for request_id in request_ids]

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
    ) -> Iterator[RequestOutput]:
        """Yields the output so far of every request after each step, the last one `finished`.

        Requests are queued at the call; closing the iterator early aborts what is left.
        """
        request_ids = self.add_requests(prompts, sampling_params, stream=True)
        return self._stream(request_ids)

    def _stream(self, request_ids: list[RequestId]) -> Iterator[RequestOutput]:
        left = dict.fromkeys(request_ids)
        try:
            while left:
                ended: list[RequestOutput] = []
                for output in self._step():
                    mine = output.request_id in left
                    (ended if mine else self._unclaimed).append(output)
                    left.pop(output.request_id, None)
                yield from self._requests.progress([*left])
                yield from ended
        finally:
            self._drop([*left])

    # Step by step ----------------------------------------------------------------------------

    def add_requests(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        stream: bool = False,
    ) -> list[RequestId]:
        """Queues all prompts, or none if one of them is wrong, and returns their ids."""
        self._check_open()
        items = split_prompts(prompts)
        params = per_prompt_params(sampling_params, len(items))
        arrival_ns = self._loop.now_ns()
        vocab_size = self.model_config.vocab_size
        ready: list[tuple[Request, LiveRequest]] = []
        for place, (item, param) in enumerate(zip(items, params, strict=True)):
            prompt = to_token_prompt(item, self.tokenizer, vocab_size, place)
            number = self._next_id + place
            live = LiveRequest(number, prompt, param, arrival_ns, self.tokenizer, stream)
            request = self._kernel_request(live)
            check_request(self._loop.scheduler.config, request, self._requests)
            ready.append((request, live))
        self._next_id += len(ready)
        for request, live in ready:
            self._loop.add(request, self._sampling_of(request, live), arrival_ns)
            self._requests.add(live)
        return [request.request_id for request, _ in ready]

    def step(self) -> list[RequestOutput]:
        """Runs one step and returns the outputs of requests that have ended since the last call.

        Raises:
            StepFailed: it could not be computed; its requests end with reason `error`.
        """
        ended, self._unclaimed = self._unclaimed, []
        return ended + self._step()

    def abort(self, request_id: RequestId) -> RequestOutput | None:
        """Ends a request in any state; returns its output, or None if no such request is live."""
        self._check_open()
        if request_id not in self._requests:
            return None
        finished = self._loop.abort(request_id)
        if finished is not None:
            return self._requests.finish(finished, self._loop.now_ns())
        self._settle()
        return self._claim(request_id)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether a request is queued or running."""
        return len(self._requests) > 0

    # Parts -----------------------------------------------------------------------------------

    def _step(self, progress: Progress | None = None, refill: bool = True) -> list[RequestOutput]:
        self._check_open()
        try:
            events = self._loop.step(self._requests.watch, refill)
        except BaseException:
            now_ns = self._loop.now_ns()
            failed = self._loop.take_failed()
            self._unclaimed += [self._requests.finish(item, now_ns) for item in failed]
            if self._executor.is_dead:
                self.close()
            raise
        if events is None:
            return []
        if progress is not None:
            progress.count(events.plan, events.duration_ns)
        if self.on_step is not None:
            self.on_step(events)
        outputs = self._requests.record(events)
        if not len(self._requests):
            # The step ahead holds blocks of requests that ended meanwhile until its commit.
            self._settle()
        return outputs

    def _settle(self) -> None:
        """Commits the open steps without starting new ones."""
        while self._loop.num_open:
            self._unclaimed += self._step(refill=False)

    def _drop(self, request_ids: Sequence[RequestId]) -> None:
        """Takes the requests of a failed or abandoned call out of the engine."""
        left = [name for name in request_ids if name in self._requests]
        if not self._closed and left:
            for request_id in left:
                finished = self._loop.abort(request_id)
                if finished is not None:
                    self._requests.finish(finished, self._loop.now_ns())
            with contextlib.suppress(StepFailed, EngineClosed):
                self._settle()
        own = frozenset(request_ids)
        self._unclaimed = [item for item in self._unclaimed if item.request_id not in own]

    def _claim(self, request_id: RequestId) -> RequestOutput | None:
        for place, output in enumerate(self._unclaimed):
            if output.request_id == request_id:
                return self._unclaimed.pop(place)
        return None

    def _kernel_request(self, live: LiveRequest) -> Request:
        params, prompt = live.params, live.prompt.token_ids
        limit = self._loop.scheduler.config.max_model_len
        stops = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= self._eos_token_ids  # BUG-C48
        return Request(
            live.request_id,
            Prompt(prompt),
            max(1, limit - len(prompt)) if params.max_tokens is None else params.max_tokens,
            stop_token_ids=stops,
            min_tokens=params.min_tokens,
        )

    def _sampling_of(self, request: Request, live: LiveRequest) -> RequestSampling:
        seed = request_seed(live.params, self.options.seed, live.number)
        return RequestSampling(live.params, seed, len(request.prompt), request.stop_token_ids)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine is closed")

    # End -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Frees devices and worker processes and completes the step log; idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._log is not None:
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
