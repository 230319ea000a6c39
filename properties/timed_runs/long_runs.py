"""LAW-M12: what a server keeps is bounded by its live requests, however many it has served.

What a run is asked for at its end (per-request columns, sums and gaps) is left out.
"""

from __future__ import annotations

from properties.follower.view import LawBroken
from properties.search.sizes import bounded, kernel_bound
from properties.timed_runs.random_runs import RandomRun, random_run
from sim.cluster.clock import Clock
from sim.cluster.router import make_router
from sim.cluster.server import Server
from sim.cluster.simulation import Simulation
from sim.metrics.requests import Ledger
from sim.metrics.server_stats import ServerStats
from sim.metrics.token_gaps import GapPool
from sim.workloads.generators import generate, preset

KEPT_FOR_THE_END = (Clock, Ledger, ServerStats, GapPool)
NUM_REQUESTS = 700
LOOK_EVERY = 100


def server_bound(server: Server) -> int:
    """The kernel's bound, and a few items more for each live request."""
    return kernel_bound(server.scheduler) + 8 * len(server.scheduler.state.sequences)


class _Onlooker:
    """Looks at the servers now and then; SimPy would not hand an alarm on as it is."""

    def __init__(self) -> None:
        self.servers: list[Server] = []
        self.alarms: list[LawBroken] = []

    def look(self, num_ended: int) -> None:
        """Called at every end of a request."""
        if num_ended % LOOK_EVERY:
            return
        try:
            for server in self.servers:
                bounded(server, server_bound(server), "M12", KEPT_FOR_THE_END)
        except LawBroken as alarm:
            self.alarms.append(alarm)


def few_things_kept(run: RandomRun) -> None:
    """LAW-M12 for the parts of a random run, under many more requests."""
    clients = preset(
        "closed", prompt="uniform:1:50", output="uniform:1:12", num_requests=NUM_REQUESTS, clients=6
    )
    onlooker = _Onlooker()
    simulation = Simulation(
        generate("closed", clients, 1),
        run.parts.kernel,
        run.parts.costs,
        run.parts.physics,
        make_router("round-robin"),
        on_progress=onlooker.look,
    )
    onlooker.servers = simulation.servers
    simulation.run()
    for alarm in onlooker.alarms:
        raise alarm


def long_runs(num_runs: int = 6) -> None:
    """LAW-M12 in all policies, synchronous and asynchronous."""
    for seed in range(num_runs):
        few_things_kept(random_run(seed))
