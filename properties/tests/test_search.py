"""The search keeps all laws, meets every goal, is reproducible, and finds the canary."""

from __future__ import annotations

from properties.follower.goals import GOALS, IMPOSSIBLE
from properties.search.search import search, search_chunk


def test_search_keeps_all_laws_and_meets_every_goal_under_both_policies() -> None:
    for policy in ("mixed", "prefill_first"):
        result = search(seed=1, workloads=6000, policy=policy)
        assert result.failures == []
        missed = {goal for goal in GOALS if not result.goals[goal]}
        assert missed == IMPOSSIBLE[policy]


def test_canary_that_hits_one_workload_in_a_hundred_is_found() -> None:
    result = search(
        seed=2, workloads=2000, target="properties.defects.canary:rarely_stale", max_failures=10**9
    )
    laws = {law for _, _, law, _ in result.failures}
    assert laws & {"K3", "K4", "K6"}
    share = len(result.failures) / result.workloads
    assert 0.002 < share < 0.05, f"the canary hits {share:.1%}: it is no canary any more"


def test_same_seed_gives_the_same_search() -> None:
    one, other = (search_chunk("engine.core:Scheduler", 77, 200, None) for _ in range(2))
    assert one == other
