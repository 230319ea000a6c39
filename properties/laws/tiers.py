"""The laws of the host tier behind the pool."""

from __future__ import annotations

from functools import partial

from properties.defects import host_tier
from properties.laws.registry import Law
from properties.search.tiers import compare_with_one_pool, first_alarm, run_random

_T = "properties.search.tiers"
_HOLDS = "`mixed` and `priority`, with `host_blocks`"

TIER_LAWS = (
    Law(
        "H1",
        "The host tier holds at most `host_blocks` keys, each in a slot of its own, and none that "
        "the pool holds.",
        _HOLDS,
        ("engine.core.audit:audit", f"{_T}:run_random"),
        partial(first_alarm, host_tier.KeepsWhatThePoolHas, "H1", run_random),
        "KeepsWhatThePoolHas",
    ),
    Law(
        "H2",
        "After a step's copies, done in their order, every position that it reads holds KV of its "
        "own tokens, whether it stayed in the pool or came back from the host.",
        _HOLDS,
        (f"{_T}:Memory.run",),
        partial(first_alarm, host_tier.FreesSlotsBeforeLoading, "H2", run_random),
        "FreesSlotsBeforeLoading, KeepsCopiesOfFailedSteps",
    ),
    Law(
        "H3",
        "Prompts that end within a block, one at a time and with one output each, hit what they "
        "would in a pool of `num_blocks + host_blocks`.",
        _HOLDS,
        (f"{_T}:compare_with_one_pool",),
        partial(first_alarm, host_tier.DropsNewest, "H3", compare_with_one_pool),
        "DropsNewest",
    ),
)
