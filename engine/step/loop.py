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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from engine.core.audit import audit
from engine.core.errors import LockstepError
from engine.core.plan import Finished, StepOutcome, StepPlan
from engine.core.request import Request, RequestId
from engine.core.scheduler import Scheduler
from engine.step.builder import RequestSampling, StepBuilder, batch_order
from engine.steplog.api import AddRecord, StepEvent, StepLogWriter
from engine.worker.command import StepLogprobs, StepResult
from engine.worker.executor import Executor
from engine.worker.graphs import bucket_for

# Called with a plan and its tokens before they are committed; returns the ids to stop.
TokenWatcher = Callable[[StepPlan, Sequence[int]], Collection[RequestId]]


class StepFailed(LockstepError):
    """A step raised (see `__cause__`); its requests ended with reason `error`.

    The scheduler is clean, and the engine takes further requests unless its executor is dead.
    """


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What one committed step changed; tokens and logprobs are in the order of
    `plan.sampled_ids`, voided entries included."""

    plan: StepPlan
    token_ids: Sequence[int]
    outcome: StepOutcome
    start_ns: int
    end_ns: int
    duration_ns: int
    host_ns: int
    device_ns: int | None
    graph_bucket: int | None
    logprobs: StepLogprobs | None = None


@dataclass(slots=True)
class _OpenStep:
    plan: StepPlan
    launched: bool  # an empty plan (everything running is about to end) is committed as it is
    start_ns: int
    host_ns: int
    open_plans: int
    bucket: int | None


class StepLoop:
    """Owns the kernel and drives the executor."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        builder: StepBuilder,
        log: StepLogWriter | None,
        debug: bool,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._builder = builder
        self._graph_sizes = executor.info.graph_sizes
        # A CPU in this process computes within `launch`; that is no cost of the host's own work.
        info = executor.info
        self._launch_computes = info.device == "cpu" and info.tensor_parallel_size == 1
        self._log = log
        self._debug = debug
        self._depth = 2 if scheduler.config.async_scheduling else 1
        self._open: deque[_OpenStep] = deque()
        self._failed: list[Finished] = []
        self._origin_ns = time.perf_counter_ns()
        self._last_end_ns = 0

    def now_ns(self) -> int:
        """Nanoseconds since the engine started; the clock of log and metrics."""
        return time.perf_counter_ns() - self._origin_ns

    @property
    def num_open(self) -> int:
        """Steps that were scheduled and not committed."""
        return len(self._open)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._open) or self.scheduler.has_work

    def add(self, request: Request, sampling: RequestSampling, arrival_ns: int) -> None:
        """Queues a request.

        Raises:
            RequestRejected: it can never run; nothing has changed.
        """
        self.scheduler.add(request)
        self._builder.add(request.request_id, sampling)
        if self._log is not None:
            self._log.add(AddRecord(request, arrival_ns, self.now_ns(), open_plans=len(self._open)))

    def abort(self, request_id: RequestId) -> Finished | None:
        """Ends a request now, or at the commit of the open step (None)."""
        open_plans = len(self._open)
        finished = self.scheduler.abort(request_id)
        if self._log is not None:
            self._log.abort(request_id, self.now_ns(), open_plans=open_plans)
        if finished is not None:
            self._builder.remove(request_id)
        return finished

    def step(self, watch: TokenWatcher, refill: bool = True) -> StepEvents | None:
        """Runs one step to its commit; with `refill=False` nothing new is scheduled.

        Returns None if there was nothing to do.

        Raises:
            StepFailed: computing it failed.
        """
        try:
            if refill:
                self._fill()
            if not self._open:
                return None
            return self._finish_oldest(watch)
        except Exception as error:
            self._discard_all()
            raise StepFailed(f"the step failed: {type(error).__name__}: {error}") from error
        except BaseException:  # an interrupt leaves nothing half-done either
            self._discard_all()
            raise

    def _fill(self) -> None:
        while len(self._open) < self._depth and self.scheduler.has_work:
            begin_ns = self.now_ns()
            open_plans = len(self._open)
            plan = self.scheduler.schedule()
            # From here on the plan is open, so a failure must discard it.
            step = _OpenStep(plan, False, begin_ns, 0, open_plans, None)
            self._open.append(step)
            command = self._builder.build(plan)
            if plan.num_entries:
                if self._graph_sizes and not plan.chunks:
                    step.bucket = bucket_for(len(plan.decode), self._graph_sizes)
                self.executor.launch(command)
                step.launched = True
            step.host_ns = self.now_ns() - begin_ns

    def _finish_oldest(self, watch: TokenWatcher) -> StepEvents:
        step = self._open[0]
        result = self.executor.collect() if step.launched else None
        end_ns = self.now_ns()
        tokens, logprobs = _in_batch_order(step.plan, result)
        stopped = watch(step.plan, tokens)
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
        events = StepEvents(
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
        )
        if self._log is not None:
            self._write_log(self._log, events, step.open_plans)
        return events

    def _write_log(self, log: StepLogWriter, events: StepEvents, open_plans: int) -> None:
        log.step(
            StepEvent(
                events.plan,
                events.outcome,
                events.start_ns,
                events.duration_ns,
                host_ns=events.host_ns,
                device_ns=events.device_ns,
                graph_bucket=events.graph_bucket,
                open_plans=open_plans,
            )
        )

    def take_failed(self) -> tuple[Finished, ...]:
        """The requests that failed steps ended since the last call."""
        failed, self._failed = tuple(self._failed), []
        return failed

    def _discard_all(self) -> None:
        """Undoes every open step after a failure; their requests are over."""
        self.executor.reset()
        self._builder.forget_rows()
        if not self._open:
            return
        steps = [*self._open]
        self._open.clear()
        failed = self.scheduler.discard(steps[0].plan)
        end_ns = self.now_ns()
        for request in failed:
            self._builder.remove(request.request_id)
        self._failed += failed
        for index, step in enumerate(steps):
            start_ns = max(step.start_ns, self._last_end_ns)
            if self._log is not None:
                ended = failed if index == 0 else ()
                self._log.discarded(
                    step.plan,
                    ended,
                    start_ns,
                    max(0, end_ns - start_ns),
                    open_plans=step.open_plans,
                )
            self._last_end_ns = end_ns


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
