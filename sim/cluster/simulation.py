"""One simulated run: arrivals, a router and servers on one SimPy clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import simpy

from engine.core import ConfigError, InputError, KernelConfig, Prompt, Request, RequestRejected
from engine.steplog.api import StepListener
from sim.cluster.async_server import AsyncServer
from sim.cluster.clock import ARRIVAL, Clock, Moment, call_at
from sim.cluster.router import Router
from sim.cluster.server import Server
from sim.cost.features import CostModel
from sim.cost.physics import Physics
from sim.cost.pipeline import NO_HOST, PipelineCostModel
from sim.metrics.requests import COMPLETED, PENDING, STARVED, Ledger
from sim.metrics.result import RunResult
from sim.metrics.server_stats import ServerStats
from sim.workloads.table import Workload, output_stripe

ON_OVERSIZE = ("reject", "error")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a run treats its requests.

    `max_concurrency` bounds the requests that the client has in flight; the others wait at the
    client, and that wait is part of their latency.
    """

    on_oversize: str = "reject"
    max_concurrency: int | None = None
    step_by_step: bool = False

    def __post_init__(self) -> None:
        if self.on_oversize not in ON_OVERSIZE:
            raise ConfigError("on_oversize", self.on_oversize, "must be reject or error")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError("max_concurrency", self.max_concurrency, "must be at least 1")


class Simulation:
    """Runs a workload once on `len(costs)` replicas; one object per run."""

    def __init__(
        self,
        workload: Workload,
        config: KernelConfig,
        costs: Sequence[CostModel],
        physics: Physics,
        router: Router,
        options: RunOptions | None = None,
        log: StepListener | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        self._workload, self._config = workload, config
        self._router, self._options = router, options or RunOptions()
        self._env = Clock()
        self._ledger = Ledger(len(workload))
        self._on_progress, self._num_ended = on_progress, 0
        self._num_sent = 0
        self._host = costs[0].host if isinstance(costs[0], PipelineCostModel) else NO_HOST
        self._handed_ns = 0
        self._at_client: deque[int] = deque()
        self.servers = self._make_servers(costs, physics, log)
        # Those that take new requests; in a plain fleet all do.
        self._fronts: Sequence[Server] = self.servers

    @property
    def ledger(self) -> Ledger:
        """What has happened to every request so far."""
        return self._ledger

    def _make_servers(
        self, costs: Sequence[CostModel], physics: Physics, log: StepListener | None
    ) -> list[Server]:
        """Equal replicas, one per cost model; other fleets override this."""
        config = self._config
        kind = AsyncServer if config.async_scheduling else Server
        return [
            kind(
                self._env,
                index,
                config,
                cost,
                self._ledger,
                ServerStats(physics, config.num_blocks, getattr(cost, "physical", True)),
                self._on_finish,
                log,
                self._options.step_by_step,
            )
            for index, cost in enumerate(costs)
        ]

    def run(self) -> RunResult:
        """Runs until no request is left.

        Raises:
            InputError: an oversize request with `on_oversize="error"`, or none that can run.
        """
        self._env.process(self._arrivals())
        self._env.run()
        ledger = self._ledger
        for row, status in enumerate(ledger.status):
            if status == PENDING:
                ledger.status[row] = STARVED  # its predecessor was left out
        if not any(status == COMPLETED for status in ledger.status):
            raise InputError(f"no request can run: {ledger.first_rejection}")
        servers = tuple(server.stats for server in self.servers)
        end_ns = max(max(server.last_end_ns for server in servers), max(ledger.finish_ns))
        return RunResult(self._workload, ledger, servers, end_ns)

    def _arrivals(self) -> Generator[simpy.Event, None, None]:
        """Sends the rows whose arrival is known."""
        env = self._env
        for row, time_ns in enumerate(self._workload.arrival_ns):
            if time_ns < 0:
                continue
            if time_ns > env.now:
                yield Moment(env, time_ns, ARRIVAL)
            self._arrive(row)

    def _arrive(self, row: int) -> None:
        self._ledger.arrived(row, self._env.now)
        limit = self._options.max_concurrency
        if limit is not None and self._num_sent >= limit:
            self._at_client.append(row)
            return
        self._num_sent += 1
        self._send(row)

    def _send(self, row: int) -> None:
        """Hands a request over to its server, which may take time; in order."""
        delay_ns = self._host.hand_over_ns(self._workload.prompt_tokens[row])
        if not delay_ns:
            self._submit(row)
            return
        self._handed_ns = max(self._handed_ns, self._env.now + delay_ns)
        call_at(self._env, self._handed_ns, ARRIVAL, lambda: self._submit(row))

    def _submit(self, row: int) -> None:
        workload = self._workload
        request = workload.request(row)
        prompt, num_outputs = request.prompt, request.max_tokens
        try:
            self._check_length(request, prompt, num_outputs)
            fronts = self._fronts
            index = self._router.choose(prompt, fronts) if len(fronts) > 1 else 0
            self._ledger.replica[row] = index
            first_output_id = output_stripe(row, num_outputs).start
            fronts[index].add(request, row, first_output_id, num_outputs)
        except RequestRejected as rejection:
            self._reject(row, rejection)

    def _check_length(self, request: Request, prompt: Prompt, num_outputs: int) -> None:
        # The kernel would end such a request early; a trace says how long it was, so it is refused.
        total, limit = len(prompt) + num_outputs, self._config.max_model_len
        if total > limit:
            raise RequestRejected(
                request.request_id,
                "exceeds_max_model_len",
                f"{len(prompt)} prompt and {num_outputs} output tokens, max_model_len={limit}",
            )

    def _reject(self, row: int, rejection: RequestRejected) -> None:
        if self._options.on_oversize == "error":
            raise InputError(f"{self._workload.name}: row {row + 1}: {rejection}")
        self._ledger.rejected(row, self._env.now, rejection.reason, str(rejection))
        if self._workload.sessions is None:
            self._send_successor(row)  # a conversation ends here, a closed-loop client goes on
        self._ended()

    def _on_finish(self, row: int) -> None:
        self._send_successor(row)
        self._ended()

    def _send_successor(self, row: int) -> None:
        successor = self._workload.successor(row)
        if successor < 0:
            return
        think_ns = self._workload.think_ns
        send_ns = self._env.now + (think_ns[successor] if think_ns else 0)
        call_at(self._env, send_ns, ARRIVAL, lambda: self._arrive(successor))

    def _ended(self) -> None:
        self._num_ended += 1
        if self._on_progress is not None:
            self._on_progress(self._num_ended)
        if not self._at_client:
            self._num_sent -= 1
            return
        # The place in flight passes on at once, before an arrival of this time can take it.
        row = self._at_client.popleft()
        call_at(self._env, self._env.now, ARRIVAL, lambda: self._send(row))
