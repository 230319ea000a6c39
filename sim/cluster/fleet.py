"""Fleets of unequal servers: replicas of several kinds, or prefill and decode servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.core import ConfigError, KernelConfig, Prompt, Request, RequestRejected
from engine.steplog.api import StepListener
from sim.cluster.async_server import AsyncServer
from sim.cluster.clock import ARRIVAL, call_at
from sim.cluster.prefill_decode import DecodeServer, KvLink, PrefillServer, decode_config
from sim.cluster.router import Router
from sim.cluster.server import Server
from sim.cluster.simulation import RunOptions, Simulation
from sim.cost.features import CostModel
from sim.cost.physics import Physics
from sim.metrics.server_stats import ServerStats
from sim.specs.kv_pool import blocks_per_sequence
from sim.workloads.table import Workload, output_stripe

ROLES = ("mixed", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class Member:
    """One server of a fleet; `role` is mixed, prefill or decode."""

    config: KernelConfig
    cost: CostModel
    physics: Physics
    role: str = "mixed"


def check_roles(option: str, roles: Sequence[str]) -> None:
    """Raises ConfigError for a fleet that cannot serve a request from prompt to end."""
    present = set(roles)
    if present not in ({"mixed"}, {"prefill", "decode"}):
        raise ConfigError(
            option,
            ", ".join(sorted(present)),
            "a fleet has mixed servers only, or both prefill and decode servers",
        )


class FleetSimulation(Simulation):
    """Runs a workload once on the members of a fleet.

    `router` sends new requests to mixed or prefill servers, `decode_router` those with a computed
    prompt to decode servers. A request that does not fit on every server is left out.
    """

    def __init__(
        self,
        workload: Workload,
        members: Sequence[Member],
        router: Router,
        decode_router: Router,
        link: KvLink,
        options: RunOptions | None = None,
        on_progress: Callable[[int], None] | None = None,
        log: StepListener | None = None,
    ) -> None:
        check_roles("fleet", [member.role for member in members])
        if any(member.role != "mixed" and member.config.async_scheduling for member in members):
            reason = "servers for prefill or decode alone are simulated without it"
            raise ConfigError("async_scheduling", True, reason)
        self._members, self._decode_router, self._link = members, decode_router, link
        self._decoders: list[DecodeServer] = []
        smallest = min((member.config for member in members), key=lambda one: one.max_model_len)
        costs = [member.cost for member in members]
        super().__init__(
            workload, smallest, costs, members[0].physics, router, options, log, on_progress
        )
        self._decoders = [one for one in self.servers if isinstance(one, DecodeServer)]
        if self._decoders:
            self._fronts = [one for one in self.servers if isinstance(one, PrefillServer)]

    def _make_servers(
        self, costs: Sequence[CostModel], physics: Physics, log: StepListener | None
    ) -> list[Server]:
        return [self._make_server(index, member, log) for index, member in enumerate(self._members)]

    def _make_server(self, index: int, member: Member, log: StepListener | None) -> Server:
        cost, config = member.cost, member.config
        step_by_step = self._options.step_by_step
        if member.role == "decode":
            config = decode_config(config)
        stats = ServerStats(member.physics, config.num_blocks, getattr(cost, "physical", True))
        arguments = (self._env, index, config, cost, self._ledger, stats, self._on_finish)
        if member.role == "prefill":
            return PrefillServer(*arguments, self._on_prefilled, log, step_by_step)
        if member.role == "decode":
            return DecodeServer(*arguments, log, step_by_step)
        kind = AsyncServer if config.async_scheduling else Server
        return kind(*arguments, log, step_by_step)

    def _check_length(self, request: Request, prompt: Prompt, num_outputs: int) -> None:
        super()._check_length(request, prompt, num_outputs)
        for member in self._members:
            need = blocks_per_sequence(len(prompt) + num_outputs, member.config.block_size)
            if need > member.config.num_blocks:
                raise RequestRejected(
                    request.request_id,
                    "pool_too_small",
                    f"needs {need} blocks, num_blocks={member.config.num_blocks}",
                )

    # From prefill to decode -----------------------------------------------------------------

    def _on_prefilled(self, row: int) -> None:
        # Routers look at servers, which is safe only after all step ends of this time.
        call_at(self._env, self._env.now, ARRIVAL, lambda: self._transfer(row))

    def _transfer(self, row: int) -> None:
        """Puts the KV of a request on its prefill server's link."""
        source = self.servers[self._ledger.replica[row]]
        assert isinstance(source, PrefillServer)
        prompt = self._workload.prompt(row)
        decoders = self._decoders
        index = self._decode_router.choose(prompt, decoders) if len(decoders) > 1 else 0
        physics = source.stats.physics
        source.link_free_ns = self._link.end_ns(
            len(prompt) * physics.kv_token_bytes,
            self._ledger.first_scheduled_ns[row],
            self._env.now,
            source.link_free_ns,
            physics.model.num_layers,
        )
        arrival_ns = source.link_free_ns + self._link.latency_ns
        target = decoders[index]
        call_at(self._env, arrival_ns, ARRIVAL, lambda: self._deliver(row, target))

    def _deliver(self, row: int, target: DecodeServer) -> None:
        workload, ledger = self._workload, self._ledger
        ledger.replica[row] = target.index
        request = workload.request(row)
        first_output_id = output_stripe(row, request.max_tokens).start
        target.receive(request, row, first_output_id, ledger.first_token_ns[row])
