"""The replicas of a twin on one clock: requests in, tokens and ends out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from engine.core import LockstepError, Prompt, Request, RequestId
from engine.server.messages import Delta, GenerateRequest, StepStats
from engine.steplog.api import StepEvent, StepLogWriter
from sim.cluster.clock import ARRIVAL, STEP_END, call_at
from sim.cluster.router import Router
from sim.cost.features import CostModel
from sim.cost.pipeline import NO_HOST, PipelineCostModel
from sim.metrics.requests import UNSET
from sim.metrics.server_stats import ServerStats
from sim.run.deployment import Parts
from sim.twin.answers import Answer, AnswerMaker
from sim.twin.faults import Faults, slowed
from sim.twin.pacing import NS_PER_S, Pace
from sim.twin.replica import AsyncTwinServer, ForgetfulGaps, Listeners, TwinServer
from sim.twin.rows import RowPool

# What came of a request: `put(request_id, delta)`.
Put = Callable[[str, Delta], None]


@dataclass(slots=True)
class Open:
    """A request that is in, or on its way to a replica."""

    request: GenerateRequest
    answer: Answer
    row: int
    server: TwinServer | None = None
    num_tokens: int = 0
    num_preemptions: int = 0
    is_aborted: bool = False
    fails_at: int | None = None  # after so many tokens


class TwinCluster:
    """Routes requests to replicas and says, at the time a client would see it, what they give."""

    def __init__(
        self,
        parts: Parts,
        router: Router,
        pace: Pace,
        faults: Faults,
        put: Put,
        on_step: Callable[[StepStats], None],
        log: StepLogWriter | None = None,
        on_all_down: Callable[[], None] = lambda: None,
    ) -> None:
        self._parts, self._router, self._pace, self._faults = parts, router, pace, faults
        self._put, self._on_step, self._log = put, on_step, log
        self._on_all_down = on_all_down
        self._clock = pace.clock
        self._rows = RowPool()
        self._open: dict[RequestId, Open] = {}
        self._by_row: dict[int, Open] = {}
        self._answers: dict[RequestId, Answer] = {}
        self._handed_ns = 0
        cost = parts.costs[0]
        self._host = cost.host if isinstance(cost, PipelineCostModel) else NO_HOST
        self.servers = [self._make(index, cost) for index, cost in enumerate(parts.costs)]
        for seconds, replica in faults.fail_at:
            time_ns = self._clock.now + round(seconds * NS_PER_S)
            call_at(self._clock, time_ns, STEP_END, partial(self.fail, self.servers[replica]))

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    @property
    def working(self) -> Sequence[TwinServer]:
        """Replicas that have not failed."""
        return [server for server in self.servers if not server.is_down]

    def add(self, request: GenerateRequest, maker: AnswerMaker, fails_at: int | None) -> None:
        """A client's request; it comes to a replica when the front end would have handed it over.

        Its own clock began at `arrival_ns`: what the HTTP front end took has passed already.
        """
        answer = maker.answer(request, self._parts.kernel.max_model_len)
        opened = Open(request, answer, self._rows.take(), fails_at=fails_at)
        self._open[request.request_id] = self._by_row[opened.row] = opened
        arrival_ns = self._pace.simulated_ns(request.arrival_ns)
        hand_over_ns = self._host.hand_over_ns(len(request.prompt_token_ids))
        self._handed_ns = max(self._handed_ns, arrival_ns + hand_over_ns)
        call_at(self._clock, self._handed_ns, ARRIVAL, lambda: self._submit(opened))
        self._pace.poke()

    def abort(self, request_id: str) -> None:
        """The client has gone; nothing more is put."""
        opened = self._open.get(request_id)
        if opened is None or opened.is_aborted:
            return
        opened.is_aborted = True
        if opened.server is not None:
            now = max(self._clock.now, self._pace.simulated_ns(opened.request.arrival_ns))
            call_at(self._clock, now, ARRIVAL, lambda: self._abort(opened))
            self._pace.poke()

    def fail(self, server: TwinServer) -> None:
        """A replica dies: its requests end with an error, new ones go elsewhere."""
        server.is_down = True
        for opened in [one for one in self._open.values() if one.server is server]:
            self._give_up(opened, f"replica {server.index} has failed")
        if not self.working:
            self._on_all_down()

    # Into a replica -------------------------------------------------------------------------

    def _submit(self, opened: Open) -> None:
        request = opened.request
        if opened.is_aborted:
            self._end(opened)
            return
        servers = self.working
        if not servers:
            self._fail_request(opened, "all replicas have failed")
            return
        prompt = Prompt(request.prompt_token_ids)
        index = self._router.choose(prompt, servers) if len(servers) > 1 else 0
        opened.server = servers[index]
        now = self._clock.now
        self._rows.arrived(opened.row, now)
        salt = request.extra.get("cache_salt")
        try:
            opened.server.take(
                Request(
                    request.request_id,
                    prompt,
                    opened.answer.num_tokens,
                    extra_keys=(("salt", str(salt)),) if salt is not None else (),
                    priority=request.priority,
                    arrival=request.arrival_ns,
                ),
                opened.row,
                opened.answer,
            )
        except LockstepError as error:
            self._rows.rejected(opened.row, now, "rejected", "")
            self._fail_request(opened, str(error))

    def _abort(self, opened: Open) -> None:
        request_id = opened.request.request_id
        server = opened.server
        if server is None or self._open.get(request_id) is not opened:
            return
        open_plans = len(server.scheduler.open_plans)
        if self._log is not None:
            self._log.abort(
                request_id, self._clock.now, open_plans=open_plans, replica=server.index
            )
        server.abort(request_id)

    def _give_up(self, opened: Open, reason: str) -> None:
        """Ends a request with an error that its client sees."""
        if not opened.is_aborted:
            self._put_error(opened, reason)
            opened.is_aborted = True
        # Not within the end of a step, where this may come from.
        call_at(self._clock, self._clock.now, ARRIVAL, lambda: self._abort(opened))

    # Out of a replica -----------------------------------------------------------------------

    def _make(self, index: int, cost: CostModel) -> TwinServer:
        kernel = self._parts.kernel
        stats = ServerStats(self._parts.physics, kernel.num_blocks, check_floor=False)
        stats.gaps = ForgetfulGaps()
        kind = AsyncTwinServer if kernel.async_scheduling else TwinServer
        server = kind(
            self._clock,
            index,
            kernel,
            slowed(cost, self._faults.slowness(index)),
            self._rows,
            stats,
            self._on_row_end,
            Listeners(lambda event: self._on_event(server, event), self._log),
            step_by_step=True,
        )
        server.answer_with(self._answers)
        return server

    def _on_event(self, server: TwinServer, event: StepEvent) -> None:
        """A step was committed; its client sees it now or a little later."""
        plan, outcome = event.plan, event.outcome
        for request_id in plan.preempted:
            if request_id in self._open:
                self._open[request_id].num_preemptions += 1
        reasons = {finished.request_id: finished.reason for finished in outcome.finished}
        seen_ns = server.seen_ns
        given = [
            (opened, token_id, reasons.get(request_id))
            for request_id, token_id in zip(outcome.sampled, outcome.token_ids, strict=True)
            if not (opened := self._open[request_id]).is_aborted
        ]
        self._on_step(self._stats_of(server, event))
        if seen_ns <= self._clock.now:
            self._give(given, seen_ns)
        elif given:
            call_at(self._clock, seen_ns, STEP_END, lambda: self._give(given, seen_ns))

    def _give(self, given: list[tuple[Open, int, str | None]], seen_ns: int) -> None:
        time_ns = self._pace.wall_ns(seen_ns)
        for opened, token_id, reason in given:
            if opened.is_aborted:
                continue
            if reason == "length" and opened.answer.end is not None:
                reason = "stop"
            self._put(opened.request.request_id, self._delta(opened, token_id, reason, time_ns))
            opened.num_tokens += 1
            if opened.num_tokens == opened.fails_at and reason is None:
                self._give_up(opened, "an error was asked for (error_rate)")

    def _delta(self, opened: Open, token_id: int, reason: str | None, time_ns: int) -> Delta:
        request, server = opened.request, opened.server
        assert server is not None
        logprobs = None
        if request.logprobs is not None:
            logprobs = [opened.answer.logprobs(opened.num_tokens, request.logprobs)]
        if opened.num_tokens:
            return Delta(
                token_ids=(token_id,),
                time_ns=time_ns,
                engine=server.index,
                logprobs=logprobs,
                finish_reason=reason,
                num_preemptions=opened.num_preemptions,
            )
        scheduled_ns = self._rows.first_scheduled_ns[opened.row]
        return Delta(
            token_ids=(token_id,),
            time_ns=time_ns,
            engine=server.index,
            logprobs=logprobs,
            scheduled_ns=self._pace.wall_ns(scheduled_ns) if scheduled_ns != UNSET else time_ns,
            num_cached_tokens=self._rows.hit_tokens[opened.row],
            prompt_logprobs=opened.answer.prompt_logprobs(request),
            finish_reason=reason,
            num_preemptions=opened.num_preemptions,
        )

    def _stats_of(self, server: TwinServer, event: StepEvent) -> StepStats:
        plan, scheduler = event.plan, server.scheduler
        done = [chunk for chunk in plan.chunks if chunk.samples]
        first = [self._open[one.request_id] for one in done if one.request_id in self._open]
        first = [opened for opened in first if not opened.num_tokens]
        queried, hits = server.take_prefix_counts()
        return StepStats(
            engine=server.index,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_cache_usage=1 - scheduler.num_free_blocks / scheduler.config.num_blocks,
            num_step_tokens=plan.num_tokens,
            num_prompt_tokens=sum(len(one.request.prompt_token_ids) for one in first),
            num_cached_tokens=sum(self._rows.hit_tokens[one.row] for one in first),
            num_generation_tokens=len(event.outcome.sampled),
            num_preemptions=len(plan.preempted),
            prefix_cache_queries=queried,
            prefix_cache_hits=hits,
            time_ns=self._pace.wall_ns(event.start_ns + event.duration_ns),
            lag_ns=self._pace.lag_ns,
        )

    def _on_row_end(self, row: int) -> None:
        self._end(self._by_row[row])

    def _fail_request(self, opened: Open, reason: str) -> None:
        if not opened.is_aborted:
            self._put_error(opened, reason)
        self._end(opened)

    def _put_error(self, opened: Open, reason: str) -> None:
        delta = Delta(
            token_ids=(),
            time_ns=self._pace.wall_ns(self._clock.now),
            finish_reason="error",
            error=reason,
        )
        self._put(opened.request.request_id, delta)

    def _end(self, opened: Open) -> None:
        del self._open[opened.request.request_id], self._by_row[opened.row]
        self._rows.give_back(opened.row)
