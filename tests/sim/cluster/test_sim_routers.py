"""Routers: what each of them balances, and that none sees the future."""

from dataclasses import dataclass

import pytest
from sim_testing import ours, run, synthetic

from engine.core import ConfigError, Prompt
from sim.cluster.router import (
    ROUTERS,
    LeastKv,
    LeastOutstandingTokens,
    PowerOfTwo,
    PrefixAffine,
    RoundRobin,
    make_router,
)


@dataclass
class Load:
    outstanding_tokens: int
    synced: int = 0
    kv_use: float = 0.0

    def sync(self) -> None:
        self.synced += 1


def test_round_robin_takes_turns():
    router = RoundRobin()
    replicas = [Load(9), Load(0), Load(5)]
    assert [router.choose(Prompt([1]), replicas) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_least_outstanding_tokens_looks_at_the_present_load():
    replicas = [Load(9), Load(4), Load(4)]
    assert LeastOutstandingTokens().choose(Prompt([1]), replicas) == 1
    assert all(replica.synced for replica in replicas)


def test_least_kv_looks_at_the_share_in_use_and_then_at_tokens():
    replicas = [Load(1, kv_use=0.5), Load(9, kv_use=0.25), Load(7, kv_use=0.25)]
    assert LeastKv().choose(Prompt([1]), replicas) == 2
    assert all(replica.synced for replica in replicas)


def test_power_of_two_takes_the_lighter_of_two_and_never_the_heaviest():
    replicas = [Load(4), Load(9), Load(1), Load(6)]
    router, again = PowerOfTwo(), PowerOfTwo()
    chosen = [router.choose(Prompt([1]), replicas) for _ in range(200)]
    assert set(chosen) == {0, 2, 3}
    # Of the six pairs three have the lightest, two more the next.
    assert chosen.count(2) > chosen.count(0) > chosen.count(3)
    assert chosen == [again.choose(Prompt([1]), replicas) for _ in range(200)]
    assert sum(replica.synced for replica in replicas) == 2 * 400
    assert PowerOfTwo().choose(Prompt([1]), replicas[:1]) == 0


def test_prefix_affinity_sends_a_prefix_where_it_went_before():
    router = PrefixAffine(piece_tokens=4)
    replicas = [Load(0), Load(0)]
    first = Prompt(range(0, 12))
    assert router.choose(first, replicas) == 0
    replicas[0].outstanding_tokens = 5
    longer = Prompt.from_spans([range(0, 8), range(100, 108)])
    assert router.choose(longer, replicas) == 0
    assert router.choose(Prompt(range(500, 512)), replicas) == 1


def test_prefix_affinity_gives_way_to_load():
    router = PrefixAffine(piece_tokens=4, imbalance=1.5)
    replicas = [Load(0), Load(0)]
    prompt = Prompt(range(0, 12))
    router.choose(prompt, replicas)
    replicas[0].outstanding_tokens = 1000
    assert router.choose(prompt, replicas) == 1


def test_prefix_affinity_forgets_the_least_recently_used():
    router = PrefixAffine(piece_tokens=4, capacity=2)
    replicas = [Load(0), Load(0)]
    for start in range(0, 4000, 100):
        router.choose(Prompt(range(start, start + 8)), replicas)
    assert len(router._pieces) == 2


def test_an_unknown_router_is_refused():
    with pytest.raises(ConfigError, match="round-robin"):
        make_router("random")


@pytest.mark.parametrize("router", list(ROUTERS))
def test_every_request_is_served_once_whatever_the_router(router):
    workload = synthetic("sessions", num_requests=60, rate=10.0)
    finished = run(workload, replicas=3, router=router)
    assert finished.summary.completed == 60
    replicas = ours(finished)["replicas"]
    assert sum(replica["completed"] for replica in replicas) == 60
    assert all(replica["completed"] for replica in replicas)


def test_affinity_keeps_conversations_together():
    workload = synthetic("sessions", num_requests=120, rate=10.0, turns="6", shared_prefix=0,
                         prompt="uniform:256:512")  # fmt: skip
    affine = ours(run(workload, replicas=4, router="prefix-affine"))["prefix_hit_rate"]
    spread = ours(run(workload, replicas=4, router="round-robin"))["prefix_hit_rate"]
    assert affine > spread + 0.1
