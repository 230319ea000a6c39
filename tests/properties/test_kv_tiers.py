"""Pool and host tier hit a trace's prompts exactly as an LRU cache of their sizes does."""

from __future__ import annotations

import random

import pytest

from benchmarks.kv_tier_curve import kernel_hits, lru_hits, read_prompts
from engine.core import ConfigError, KernelConfig
from tests.places import SHARED


def test_stack_distances_of_a_case_worked_by_hand() -> None:
    # a b c a: `a` was used before two others; at capacity 2 it is gone.
    assert lru_hits([(1,), (2,), (3,), (1,)], [2, 3]) == [0, 1]


def test_random_prompts_hit_like_lru() -> None:
    rng = random.Random(3)
    roots = [tuple(range(100 * root, 100 * root + 12)) for root in range(20)]
    prompts = [rng.choice(roots)[: rng.randint(1, 12)] for _ in range(400)]
    for pool, host in ((16, 0), (16, 1), (16, 40), (50, 300)):
        assert sum(kernel_hits(prompts, pool, host)) == lru_hits(prompts, [pool + host - 1])[0]


def test_mooncake_conversation_hits_like_lru() -> None:
    trace = SHARED / "traces/mooncake_conversation.jsonl.gz"
    if not trace.exists():
        pytest.skip("needs the shared traces")
    prompts = read_prompts(trace, 800)
    found, loaded = kernel_hits(prompts, 512, 4096)
    assert loaded > 0
    assert found + loaded == lru_hits(prompts, [512 + 4096 - 1])[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_blocks": -1}, "host_blocks"),
        ({"host_blocks": 4, "enable_prefix_caching": False}, "needs enable_prefix_caching"),
        ({"host_blocks": 4, "policy": "prefill_first"}, "belongs to policy mixed and priority"),
    ],
)
def test_wrong_tiers_are_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KernelConfig(num_blocks=8, max_model_len=16, **options)  # type: ignore[arg-type]
