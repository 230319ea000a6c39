"""A simulated host tier: its hits are counted, and its copies take time beside or before a step."""

from dataclasses import replace

import pytest
from sim_testing import synthetic

from engine.core.plan import KvCopy
from sim.cluster.host_link import HostLink
from sim.run.deployment import Deployment
from sim.run.run import RunPlan, run_plan

COPIES = (KvCopy(0, 0, to_host=True), KvCopy(1, 1, to_host=False))
SMALL = Deployment(num_kv_blocks=1200, cost="roofline")


def test_copies_take_their_bytes_over_the_bandwidth():
    link = HostLink(block_bytes=1000, gb_per_s=2.0, overlaps=False)
    assert link.step_ns(300, COPIES) == 300 + 1000
    assert replace(link, overlaps=True).step_ns(300, COPIES) == 1000
    assert replace(link, overlaps=True).step_ns(3000, COPIES) == 3000


def figures(**changes):
    workload = synthetic("sessions", num_requests=60)
    return run_plan(RunPlan(workload, replace(SMALL, **changes))).summary


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "asynchronous"])
def test_sessions_find_in_the_tier_what_the_pool_has_lost(ahead):
    without = figures(async_scheduling=ahead).sim.cache
    tier = figures(async_scheduling=ahead, host_tier_gb=20.0).sim.cache
    assert "host_hit_tokens" not in without.to_json()
    assert tier.host_hit_tokens > 0
    assert tier.prefix_hit_rate > without.prefix_hit_rate
    assert tier.host_hit_tokens <= tier.prefix_hit_tokens


def test_a_slower_link_delays_first_tokens_and_overlap_hides_it():
    slow = figures(host_tier_gb=20.0, host_tier_gb_per_s=2.0)
    hidden = figures(host_tier_gb=20.0, host_tier_gb_per_s=2.0, host_tier_overlap=True)
    fast = figures(host_tier_gb=20.0, host_tier_gb_per_s=1e5)
    assert fast.duration < hidden.duration < slow.duration
