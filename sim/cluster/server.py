"""One replica: a SimPy process that owns a kernel and lets its steps take time.

While only the same sequences decode, the process sleeps through a whole stretch of steps at once.
The kernel is brought up to date when something looks at it: an arrival, the router, the end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import accumulate

import simpy

from engine.core import KernelConfig, Prompt, Request, RequestId, Scheduler
from engine.core.plan import DecodeBatch, StepPlan
from engine.steplog.api import AddRecord, DecodeRunEvent, StepEvent, StepListener
from sim.cluster.clock import SCHEDULE, STEP_END, Clock, Moment
from sim.cluster.host_link import HostLink
from sim.cost.features import (
    CostModel,
    EngineCostModel,
    RunCostModel,
    StepFeatures,
    plan_features,
)
from sim.metrics.requests import UNSET, Ledger
from sim.metrics.server_stats import ServerStats
from sim.metrics.token_gaps import TokenClock

# Longest stretch that is planned ahead: an arrival throws the rest away.
MAX_STRETCH = 512


@dataclass(slots=True)
class Live:
    """A request on a server. `token_offset` + position = the id sampled at that position."""

    row: int
    prompt_tokens: int
    token_offset: int
    sharer: bool = False
    total_outputs: int = 0  # where another server makes all but the first


@dataclass(slots=True)
class Flight:
    """Steps that run: the first one's plan is open, the others are certain to follow."""

    plan: StepPlan
    features: StepFeatures
    start_ns: int
    durations_ns: list[int]
    ends_ns: list[int]
    open_plans: int = 0


class Server:
    """A kernel in simulated time.

    Step ends come before arrivals of the same time, and those before the next schedule.
    `on_finish(row)` is told about every finished request at the end of its last step.
    """

    def __init__(
        self,
        env: Clock,
        index: int,
        config: KernelConfig,
        cost: CostModel,
        ledger: Ledger,
        stats: ServerStats,
        on_finish: Callable[[int], None],
        log: StepListener | None = None,
        step_by_step: bool = False,
    ) -> None:
        self.index = index
        self.scheduler = Scheduler(config)
        self.stats = stats
        self._env, self._config, self._cost = env, config, cost
        self._run_cost = cost if isinstance(cost, RunCostModel) and not step_by_step else None
        self._engine_cost = cost if isinstance(cost, EngineCostModel) else None
        self.host_link: HostLink | None = None
        self._intake_ns = 0
        self._ledger, self._on_finish, self._log = ledger, on_finish, log
        self._live: dict[RequestId, Live] = {}
        self._num_sharers = 0
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._flight: Flight | None = None
        self._sleep: simpy.Event | None = None
        self._waits_for_flight = False
        self._clock = TokenClock(stats.gaps)
        # The newest decode batch, the sum of its base positions and its token ids at clock 0.
        self._batch: DecodeBatch | None = None
        self._batch_base_sum = 0
        self._batch_tokens: list[int] = []
        self._process = env.process(self._run())

    # What others ask of a server ------------------------------------------------------------

    def add(self, request: Request, row: int, first_output_id: int, num_outputs: int) -> None:
        """Takes a request at the present time.

        Raises:
            RequestRejected: it can never run; nothing has changed.
        """
        self.sync()
        self.scheduler.add(request)
        now = self._env.now
        length = len(request.prompt)
        self._live[request.request_id] = Live(row, length, first_output_id - length + 1)
        self._prompt_tokens += length
        if self._engine_cost is not None:
            self._intake_ns += self._engine_cost.intake_ns(length)
        if self._log is not None:
            outputs = Prompt(range(first_output_id, first_output_id + num_outputs))
            self._log.add(
                AddRecord(
                    request,
                    self._ledger.arrival_ns[row],
                    now,
                    outputs=outputs,
                    open_plans=len(self.scheduler.open_plans),
                    replica=self.index,
                )
            )
        sleep, self._sleep = self._sleep, None
        if sleep is not None:
            sleep.succeed()
        elif self._flight is not None and len(self._flight.durations_ns) > 1:
            # Only the step that runs is certain now.
            del self._flight.durations_ns[1:], self._flight.ends_ns[1:]
            self._interrupt()

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens and outputs so far of the unfinished requests (after `sync`)."""
        return self._prompt_tokens + self._output_tokens

    @property
    def kv_use(self) -> float:
        """Share of the KV blocks that unfinished requests hold (after `sync`)."""
        return 1 - self.scheduler.num_free_blocks / self._config.num_blocks

    def sync(self) -> None:
        """Commits the steps that have ended by now and opens the plan of the one that runs."""
        flight = self._flight
        if flight is None:
            return
        now = self._env.now
        done = bisect_right(flight.ends_ns, now)
        if not done:
            return
        assert done < len(flight.ends_ns), "LAW-M1: the end of a flight is an event of its own"
        end_ns = flight.ends_ns[done - 1]
        rest = flight.durations_ns[done:]
        self._commit(flight, done)
        if end_ns == now:
            self._flight = None  # the next schedule waits for the arrivals of this time
            self._interrupt()
            return
        plan = self.scheduler.schedule()
        features = self._features(plan)
        self._flight = Flight(plan, features, end_ns, rest, flight.ends_ns[done:])

    # The process ----------------------------------------------------------------------------

    def _run(self) -> Generator[simpy.Event, None, None]:
        env = self._env
        while True:
            if not self.scheduler.has_work:
                self._sleep = env.event()
                yield self._sleep
            yield Moment(env, env.now, SCHEDULE)
            while self._intake_ns:
                # Taking in requests takes the engine time, in which more may arrive.
                delay_ns, self._intake_ns = self._intake_ns, 0
                yield Moment(env, env.now + delay_ns, SCHEDULE)
            self._launch()
            while self._flight is not None:
                self._waits_for_flight = True
                try:
                    yield Moment(env, self._flight.ends_ns[-1], STEP_END)
                except simpy.Interrupt:
                    continue
                finally:
                    self._waits_for_flight = False
                flight, self._flight = self._flight, None
                self._commit(flight, len(flight.ends_ns))

    def _interrupt(self) -> None:
        """Wakes the process from its wait for a flight that has changed."""
        if self._waits_for_flight:
            self._waits_for_flight = False
            self._process.interrupt()

    def _launch(self) -> None:
        now = self._env.now
        plan = self.scheduler.schedule()
        self._note_queues(plan, now)
        features = self._features(plan)
        if self._run_cost is None or plan.chunks:
            durations = [self._cost.step_time_ns(features)]
        else:
            steps = min(MAX_STRETCH, self.scheduler.decode_horizon(plan))
            durations = self._run_cost.decode_run_ns(
                features.num_decodes, features.decode_context_sum, steps, features.kv_shared_tokens
            )
        if plan.copies:
            durations = [self._with_copies(plan, durations[0])]
        ends = list(accumulate(durations, initial=now))
        del ends[0]
        self._flight = Flight(plan, features, now, durations, ends)

    def _with_copies(self, plan: StepPlan, duration_ns: int) -> int:
        """How long a step takes with its copies; with a host tier steps come one by one."""
        link = self.host_link
        return duration_ns if link is None else link.step_ns(duration_ns, plan.copies)

    def _note_queues(self, plan: StepPlan, now: int) -> None:
        ledger, stats = self._ledger, self.stats
        for request_id in plan.preempted:
            live = self._live[request_id]
            ledger.preempted(live.row, now)
            self._num_sharers -= live.sharer
            live.sharer = False
        loads = sum([not copy.to_host for copy in plan.copies])
        stats.host_hit_tokens += loads * self._config.block_size
        for admission in plan.admitted:
            live = self._live[admission.request_id]
            queried = self.scheduler.num_known_tokens(admission.request_id)
            stats.hit_tokens += admission.hit_tokens
            stats.queried_tokens += queried
            if ledger.first_scheduled_ns[live.row] == UNSET:
                stats.first_hit_tokens += admission.hit_tokens
                stats.first_queried_tokens += live.prompt_tokens
            ledger.admitted(live.row, now, admission.hit_tokens)
            live.sharer = admission.hit_blocks_used + admission.hit_blocks_same_step > 0
            self._num_sharers += live.sharer

    def _features(self, plan: StepPlan) -> StepFeatures:
        decode = plan.decode
        if decode is not self._batch and decode.request_ids:
            self._enter_batch(decode)
        base_sum = self._batch_base_sum if decode.request_ids else 0
        shared = self._shared_tokens(plan) if self._num_sharers else 0
        return plan_features(plan, base_sum, shared)

    def _enter_batch(self, decode: DecodeBatch) -> None:
        """Remembers what all steps of a decode batch need."""
        live = self._live
        self._batch = decode
        self._batch_base_sum = sum(decode.base_positions)
        self._batch_tokens = [
            live[request_id].token_offset + base
            for request_id, base in zip(decode.request_ids, decode.base_positions, strict=True)
        ]

    def _shared_tokens(self, plan: StepPlan) -> int:
        """Context tokens in shared blocks, once for each member of the batch after the first."""
        size, decode, clock = self._config.block_size, plan.decode, plan.clock
        holders_run = not self.scheduler.policy.waiting_head_holds_blocks
        if holders_run and plan.num_running == plan.num_entries:
            # All holders are in the batch, so the blocks in use are those of the batch.
            held = sum([(base + clock) // size for base in decode.base_positions]) + len(decode)
            held += sum(
                [-(-(chunk.first_position + chunk.num_tokens) // size) for chunk in plan.chunks]
            )
            return (held - (self._config.num_blocks - plan.num_free_blocks)) * size
        tables = [self.scheduler.block_table(entry.request_id) for entry in plan.entries]
        return (sum(map(len, tables)) - len(set().union(*tables))) * size

    # Ends of steps --------------------------------------------------------------------------

    def _commit(self, flight: Flight, steps: int) -> None:
        """Commits the first `steps` steps of a flight."""
        plan, ends = flight.plan, flight.ends_ns[:steps]
        used = self._config.num_blocks - plan.num_free_blocks
        queues = (plan.num_running, plan.num_waiting)
        self._book_tokens(plan, ends)
        if steps == 1:
            outcome = self.scheduler.commit(plan, self._step_tokens(plan))
            self.stats.add_steps(flight.features, flight.start_ns, ends, queues, used)
            if self._log is not None:
                self._log.step(
                    StepEvent(
                        plan,
                        outcome,
                        flight.start_ns,
                        flight.durations_ns[0],
                        open_plans=flight.open_plans,
                        replica=self.index,
                    )
                )
        else:
            first = plan.clock
            starts = self._batch_tokens
            run = self.scheduler.run_decode(
                plan, steps, lambda row: range(starts[row] + first, starts[row] + first + steps)
            )
            outcome = run.outcome
            self.stats.add_steps(
                flight.features, flight.start_ns, ends, queues, used, run.new_blocks
            )
            if self._log is not None:
                durations = flight.durations_ns[:steps]
                self._log.decode_run(
                    DecodeRunEvent(plan, run, flight.start_ns, durations, replica=self.index)
                )
        if self._engine_cost is not None:
            self._engine_cost.observe(flight.features, steps)
        self._output_tokens += flight.features.num_sampled * steps
        for finished in outcome.finished:
            self._finish(finished.request_id, ends[-1], len(finished.output_token_ids))

    def _step_tokens(self, plan: StepPlan) -> list[int]:
        """The ids that the entries of one step sample, in batch order."""
        clock, passed = plan.clock, 0
        tokens = [start + clock for start in self._batch_tokens] if len(plan.decode) else []
        for chunk in plan.chunks:
            if chunk.samples:
                last = chunk.first_position + chunk.num_tokens - 1
                token_id = self._live[chunk.request_id].token_offset + last
                tokens.insert(chunk.row - passed, token_id)
            else:
                passed += 1
        return tokens

    def _book_tokens(self, plan: StepPlan, ends_ns: list[int]) -> None:
        """Books when the entries of a flight get their tokens."""
        self._note_preempted(plan)
        if plan.decode.request_ids:
            self._clock.decode(plan.decode, ends_ns)
        first_token_ns = self._ledger.first_token_ns
        for chunk in plan.chunks:
            if chunk.samples:
                self._clock.prompt_done(chunk.request_id, ends_ns[0])
                row = self._live[chunk.request_id].row
                if first_token_ns[row] == UNSET:
                    first_token_ns[row] = ends_ns[0]

    def _note_preempted(self, plan: StepPlan) -> None:
        """Only now: a token in flight came to them after this plan had been decided."""
        for request_id in plan.preempted:
            self._clock.preempted(request_id)

    def _finish(self, request_id: RequestId, time_ns: int, num_outputs: int) -> None:
        self._report(self._forget(request_id, num_outputs), time_ns, num_outputs)

    def _forget(self, request_id: RequestId, num_outputs: int) -> int:
        """Drops what the server keeps of a request; returns its row."""
        live = self._live.pop(request_id)
        self._num_sharers -= live.sharer
        self._clock.finished(request_id)
        self._prompt_tokens -= live.prompt_tokens
        self._output_tokens -= num_outputs
        return live.row

    def _report(self, row: int, time_ns: int, num_outputs: int) -> None:
        """The client sees that a request has ended."""
        self._ledger.finished(row, time_ns, num_outputs)
        self._on_finish(row)
