"""The host tier: its laws hold on random workloads, and each planted defect is noticed."""

from __future__ import annotations

import pytest

from engine.core import Scheduler
from properties.defects.host_tier import KeepsCopiesOfFailedSteps
from properties.laws.registry import Law
from properties.laws.tiers import TIER_LAWS
from properties.search.tiers import compare_with_one_pool, first_alarm, run_random


def test_laws_hold_while_blocks_come_and_go() -> None:
    assert sum(run_random(Scheduler, seed) for seed in range(1000)) > 500


def test_pool_and_tier_hit_like_one_pool() -> None:
    for seed in range(300):
        compare_with_one_pool(Scheduler, seed)


@pytest.mark.parametrize("law", TIER_LAWS, ids=lambda law: str(law.id))
def test_law_notices_its_defect(law: Law) -> None:
    assert law.canary is not None
    alarm = law.canary()
    assert alarm is not None
    assert alarm.law == law.id


def test_copies_of_a_failed_step_are_noticed() -> None:
    assert first_alarm(KeepsCopiesOfFailedSteps, "H2", run_random) is not None
