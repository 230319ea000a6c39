"""Unequal fleets, and prefill and decode on servers of their own."""

from __future__ import annotations

from array import array

import pytest

from engine.core import ConfigError
from sim.cluster.fleet import FleetSimulation, Member
from sim.cluster.prefill_decode import KvLink
from sim.cluster.router import make_router
from sim.metrics.requests import COMPLETED, REJECTED
from sim.run.deployment import Deployment, build
from sim.workloads.generators import generate, preset
from sim.workloads.table import Workload

MS = 10**6
# 1 GB/s for 28 layers x 8 heads x 128 x 2 (K, V) x 2 bytes = 114,688 bytes a token.
LINK = KvLink(bytes_per_s=1e9, latency_ns=2 * MS)
TOKEN_BYTES = 114_688


def members(roles, cost="constant:10", **options):
    deployment = Deployment(model="qwen3-0.6b", hardware="h200", cost=cost, **options)
    parts = [build(deployment, index) for index in range(len(roles))]
    return [
        Member(part.kernel, part.costs[0], part.physics, role)
        for part, role in zip(parts, roles, strict=True)
    ]


def run(workload, fleet, link=LINK, router="least-tokens"):
    simulation = FleetSimulation(workload, fleet, make_router(router), make_router(router), link)
    return simulation.run()


def workload(*rows):
    arrivals, prompts, outputs = zip(*rows, strict=True)
    return Workload("made", array("q", arrivals), array("q", prompts), array("q", outputs))


def test_one_request_takes_prefill_transfer_and_decode_steps():
    result = run(workload((0, 1000, 4)), members(["prefill", "decode"]))
    ledger = result.ledger
    transfer_ns = round(1000 * TOKEN_BYTES / 1e9 * 1e9) + 2 * MS
    assert ledger.first_token_ns[0] == 10 * MS
    assert ledger.finish_ns[0] == 10 * MS + transfer_ns + 3 * 10 * MS
    assert ledger.output_tokens[0] == 4
    assert ledger.replica[0] == 1
    gaps, counts = result.servers[1].gaps.distinct()
    assert dict(zip(gaps.tolist(), counts.tolist(), strict=True)) == {
        10 * MS: 2,
        transfer_ns + 10 * MS: 1,
    }
    # The prompt is computed once, on the prefill server.
    assert result.servers[0].prefill.num_tokens == 1000
    assert result.servers[1].prefill.num_tokens + result.servers[1].decode.num_tokens == 3


def test_a_single_token_never_leaves_the_prefill_server():
    ledger = run(workload((0, 100, 1)), members(["prefill", "decode"])).ledger
    assert ledger.finish_ns[0] == ledger.first_token_ns[0] == 10 * MS
    assert ledger.replica[0] == 0 and ledger.output_tokens[0] == 1


def test_transfers_of_one_server_queue_on_its_link():
    rows = workload((0, 1000, 2), (0, 1000, 2))
    ledger = run(rows, members(["prefill", "decode"])).ledger
    busy_ns = round(1000 * TOKEN_BYTES / 1e9 * 1e9)
    first, second = sorted(ledger.finish_ns)
    assert first == 10 * MS + busy_ns + 2 * MS + 10 * MS
    assert second == first + busy_ns


@pytest.mark.parametrize("roles", [["prefill", "decode", "decode"], ["mixed", "mixed"]])
@pytest.mark.parametrize("blocks", [None, 40])
def test_every_request_gets_all_its_tokens_and_littles_law_holds(roles, blocks):
    drawn = generate(
        "poisson",
        preset("poisson", rate=60.0, num_requests=200, prompt="uniform:20:200", output="20"),
        1,
    )
    fleet = members(roles, num_kv_blocks=blocks)
    result = run(drawn, fleet, KvLink())
    ledger = result.ledger
    assert list(ledger.status) == [COMPLETED] * 200
    assert ledger.output_tokens == drawn.output_tokens
    stay = sum(
        finish - arrival
        for finish, arrival in zip(ledger.finish_ns, ledger.arrival_ns, strict=True)
    )
    assert ledger.in_system.area_ns == stay and ledger.in_system.count == 0
    assert ledger.in_queue.count == 0
    if blocks is not None and "decode" in roles:
        assert sum(ledger.preemptions) > 0  # the recomputed ones end all the same


def test_a_slower_link_makes_no_first_token_later():
    drawn = generate("poisson", preset("poisson", rate=5.0, num_requests=60, output="20"), 2)
    fast = run(drawn, members(["prefill", "decode"]), KvLink(100e9)).ledger
    slow = run(drawn, members(["prefill", "decode"]), KvLink(2e9)).ledger
    assert fast.first_token_ns == slow.first_token_ns
    assert sum(slow.finish_ns) > sum(fast.finish_ns)


def test_a_request_that_fits_on_no_decode_server_is_left_out():
    fleet = [*members(["prefill"]), *members(["decode"], num_kv_blocks=10)]
    ledger = run(workload((0, 100, 20), (0, 200, 20)), fleet).ledger
    assert list(ledger.status) == [COMPLETED, REJECTED]


def test_the_faster_of_two_replicas_gets_more_requests():
    drawn = generate("poisson", preset("poisson", rate=20.0, num_requests=300, output="30"), 3)
    fleet = [*members(["mixed"], "constant:5"), *members(["mixed"], "constant:20")]
    replicas = list(run(drawn, fleet).ledger.replica)
    assert replicas.count(0) > 1.5 * replicas.count(1) > 0


@pytest.mark.parametrize("roles", [["prefill"], ["decode", "mixed"], ["prefill", "mixed"]])
def test_a_fleet_that_cannot_finish_a_request_is_refused(roles):
    with pytest.raises(ConfigError, match="mixed servers only, or both"):
        run(workload((0, 10, 2)), members(roles))
