"""The main loop's one step: schedule, launch, collect, commit, log.

    plan = scheduler.schedule()
    executor.launch(builder.build(plan))
    result = executor.collect()
    outcome = scheduler.commit(plan, result.token_ids)

With asynchronous scheduling the next step is scheduled and launched before the result of this one
is awaited, so the host's work is hidden behind the device's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from engine.core.audit import audit
from engine.core.errors import LockstepError
from engine.core.plan import Finished, StepPlan
from engine.core.request import Request, RequestId
from engine.core.scheduler import Scheduler
from engine.requests.committed_step import CommittedStep, PromptRows, StepLogprobs
from engine.requests.live import LiveRequest
from engine.requests.registry import RequestRegistry
from engine.step.builder import StepBuilder, batch_order
from engine.step.log import EngineLog
from engine.worker.command import StepCommand, StepResult
from engine.worker.executor import Executor
from engine.worker.graphs import bucket_for
from engine.worker.kv_cache import table_width


class StepFailed(LockstepError):
    """A step raised (see `__cause__`); its requests ended with reason `error`.

    The scheduler is clean, and the engine takes further requests unless its executor is dead.
    """


# The bytes of -1, which a row of NaN gives: nothing else has eight of them in a row. Searching them
# costs a tenth of looking at every token.
_NO_TOKEN = b"\xff" * 8


@dataclass(slots=True)
class _OpenStep:
    plan: StepPlan
    launched: bool  # an empty plan (everything running is about to end) is committed as it is
    start_ns: int
    host_ns: int
    open_plans: int
    bucket: int | None
    prompt_rows: tuple[PromptRows, ...] = ()


class StepLoop:
    """Owns the kernel, drives the executor and keeps the registry of requests true.

    Whatever is raised in here, interrupts included, is undone before it leaves: open steps are
    discarded, their requests end with reason `error`. Where the kernel itself was at work, its
    state is not trusted: all running requests end so, and a fresh kernel takes over.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        requests: RequestRegistry,
        log: EngineLog | None = None,
        debug: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.requests = requests
        self._builder = self._new_builder()
        self._graph_sizes = executor.info.graph_sizes
        # A CPU in this process computes within `launch`; that is no cost of the host's own work.
        info = executor.info
        self._launch_computes = info.device == "cpu" and info.tensor_parallel_size == 1
        self._log = EngineLog(None) if log is None else log
        self._debug = debug
        self._depth = 2 if scheduler.config.async_scheduling else 1
        self._open: deque[_OpenStep] = deque()
        self._origin_ns = time.perf_counter_ns()
        self._last_end_ns = 0
        self._is_torn = False  # kernel and registry are being changed
        self._guard = _Guard(self)

    def now_ns(self) -> int:
        """Nanoseconds since the engine started; the clock of log and metrics."""
        return time.perf_counter_ns() - self._origin_ns

    @property
    def origin_ns(self) -> int:
        """The zero of `now_ns`, by `time.perf_counter_ns`."""
        return self._origin_ns

    @property
    def num_open(self) -> int:
        """Steps that were scheduled and not committed."""
        return len(self._open)

    def add(self, live: LiveRequest, request: Request) -> None:
        """Queues a request that the kernel's `check_request` has accepted."""
        with self._guard:
            self._is_torn = True
            self.scheduler.add(request)
            self.requests.add(live)
            self._log.is_behind = True
            self._is_torn = False
            arrival_ns = live.metrics.arrival_ns
            self._log.add(request, arrival_ns, self.now_ns(), len(self._open))

    def abort(self, request_id: RequestId) -> None:
        """Ends a running request now, or at the commit of the open step."""
        with self._guard:
            if request_id not in self.requests:  # undoing an earlier call has ended it
                return
            self._is_torn = True
            open_plans = len(self._open)
            finished = self.scheduler.abort(request_id)
            if finished is not None:
                self._end(finished, self.now_ns())
            self._log.is_behind = True
            self._is_torn = False
            self._log.abort(request_id, self.now_ns(), open_plans)

    def step(self, refill: bool = True) -> CommittedStep | None:
        """Runs one step to its commit; with `refill=False` nothing new is scheduled.

        Returns None if there was nothing to do.

        Raises:
            StepFailed: computing it failed.
        """
        try:
            with self._guard:
                if refill:
                    self._fill()
                if not self._open:
                    return None
                return self._finish_oldest()
        except Exception as error:
            raise StepFailed(f"the step failed: {_words(error)}") from error

    def _fill(self) -> None:
        while len(self._open) < self._depth and self.scheduler.has_work:
            begin_ns = self.now_ns()
            self._is_torn = True
            plan = self.scheduler.schedule()
            step = _OpenStep(plan, False, begin_ns, 0, len(self._open), None)
            self._open.append(step)
            command = self._builder.build(plan)
            if command.num_prompt_logprobs is not None:
                step.prompt_rows = _prompt_rows(plan, command)
            self._is_torn = False
            if plan.num_entries:
                if self._graph_sizes and not plan.chunks:
                    step.bucket = bucket_for(len(plan.decode), self._graph_sizes)
                self.executor.launch(command)
                step.launched = True
            step.host_ns = self.now_ns() - begin_ns

    def _finish_oldest(self) -> CommittedStep:
        step = self._open[0]
        result = self.executor.collect() if step.launched else None
        end_ns = self.now_ns()
        tokens, logprobs = _in_batch_order(step.plan, result)
        self._is_torn = True
        stopped: list[RequestId] = []
        if result is not None and _NO_TOKEN in result.token_ids.tobytes():
            stopped = self.requests.spoil(step.plan, tokens)
            tokens = [max(0, token_id) for token_id in tokens]
        stopped += self.requests.watch(step.plan, tokens)
        outcome = self.scheduler.commit(step.plan, tokens, stopped)
        self._open.popleft()
        for finished in outcome.finished:
            self._builder.remove(finished.request_id)
        if self._debug and not self._open:  # the laws hold between steps
            audit(self.scheduler)
        step.host_ns += self.now_ns() - end_ns
        if result is not None and self._launch_computes:
            step.host_ns -= result.device_time_ns or 0
        # Overlapping steps share the device: one starts where the one before ended.
        start_ns = max(step.start_ns, self._last_end_ns)
        self._last_end_ns = end_ns
        committed = CommittedStep(
            plan=step.plan,
            token_ids=tokens,
            outcome=outcome,
            start_ns=start_ns,
            end_ns=end_ns,
            duration_ns=max(0, end_ns - start_ns),
            host_ns=step.host_ns,
            device_ns=None if result is None else result.device_time_ns,
            graph_bucket=step.bucket,
            logprobs=logprobs,
            prompt_rows=step.prompt_rows,
            prompt_logprobs=None if result is None else result.prompt_logprobs,
        )
        self.requests.record(committed)
        self._log.is_behind = True
        self._is_torn = False
        self._log.step(committed, step.open_plans)
        return committed

    def _end(self, finished: Finished, end_ns: int, error: str = "") -> None:
        self._builder.remove(finished.request_id)
        self.requests.finish(finished, end_ns, error)

    # After a failure --------------------------------------------------------------------------

    def undo(self, error: BaseException | None) -> None:
        """Brings kernel, registry and executor back to a state without open steps.

        May be interrupted and called again.
        """
        is_torn, self._is_torn = self._is_torn, True
        cause = "the step was interrupted" if error is None else _words(error)
        self._log.mend(cause)
        self.executor.reset()
        if is_torn or self.executor.is_dead:
            self._start_over(cause)
        else:
            self._discard_open(cause)
        self._is_torn = False

    def _discard_open(self, cause: str) -> None:
        """Undoes every open step; the requests in them are over."""
        self._builder.forget_rows()
        if not self._open:
            return
        steps = [*self._open]
        self._open.clear()
        failed = self.scheduler.discard(steps[0].plan)
        self._log.is_behind = True
        end_ns = self.now_ns()
        for finished in failed:
            self._end(finished, end_ns, cause)
        for index, step in enumerate(steps):
            start_ns = max(step.start_ns, self._last_end_ns)
            ended = failed if index == 0 else ()
            duration_ns = max(0, end_ns - start_ns)
            self._log.discarded(step.plan, ended, start_ns, duration_ns, step.open_plans)
            self._last_end_ns = end_ns

    def _start_over(self, cause: str) -> None:
        """Replaces a kernel that cannot be trusted; its cache and every running request go."""
        self._log.end_early(cause)
        self.scheduler = Scheduler(self.scheduler.config)
        self._builder = self._new_builder()
        self._open.clear()
        self.requests.fail_all(cause, self.now_ns())

    def _new_builder(self) -> StepBuilder:
        config = self.scheduler.config
        width = table_width(config.max_model_len, config.block_size)
        return StepBuilder(config.max_num_seqs, width, self.requests.sampling_of)


class _Guard:
    """Undoes what a call has left half-done: when it raises, or before the next one."""

    __slots__ = ("_is_busy", "_loop")

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._is_busy = False

    def __enter__(self) -> None:
        if self._is_busy:  # an interrupt came between the end of a call and its undoing
            self._loop.undo(None)
        self._is_busy = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._loop.undo(error)
        self._is_busy = False


def _prompt_rows(plan: StepPlan, command: StepCommand) -> tuple[PromptRows, ...]:
    return tuple(
        PromptRows(chunk.request_id, chunk.first_position + 1, len(sent.prompt_targets))
        for chunk, sent in zip(plan.chunks, command.chunks, strict=True)
    )


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _in_batch_order(
    plan: StepPlan, result: StepResult | None
) -> tuple[Sequence[int], StepLogprobs | None]:
    if result is None:
        return (), None
    order = batch_order(plan)
    columns = result.logprobs
    if order is None:
        return result.token_ids, columns
    tokens = [result.token_ids[row] for row in order]
    if columns is None:
        return tokens, None
    return tokens, StepLogprobs(
        [columns.sampled[row] for row in order],
        [columns.ranks[row] for row in order],
        [columns.top_ids[row] for row in order],
        [columns.top_logprobs[row] for row in order],
    )
