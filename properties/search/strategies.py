"""Hypothesis strategies for configurations, requests and operations."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from engine.core.config import KernelConfig

POLICIES = ("mixed", "prefill_first", "priority")


@st.composite
def configs(draw: st.DrawFn, policy: str | None = None, is_async: bool = False) -> KernelConfig:
    """Small configurations of one policy or of both."""
    chosen = policy or draw(st.sampled_from(POLICIES))
    block_size = draw(st.integers(1, 16))
    num_blocks = draw(st.integers(2, 12))
    options: dict[str, Any] = {}
    if chosen != "prefill_first":
        options["long_prefill_token_threshold"] = draw(st.sampled_from((0, 0, 1, 3, 6)))
        options["watermark_blocks"] = draw(st.sampled_from((0, 0, 1, 3)))
        options["reserve_full_prompt"] = draw(st.booleans())
        options["threshold_when_alone"] = draw(st.booleans())
        options["prefill_schedule_interval"] = draw(st.sampled_from((1, 1, 1, 2, 3)))
    else:
        for name in ("bound_holders", "bound_decode_tokens", "bound_model_len"):
            options[name] = draw(st.booleans())
    capacity = num_blocks * block_size
    return KernelConfig(
        num_blocks=num_blocks,
        max_model_len=draw(st.one_of(st.just(capacity + 4), st.integers(2, capacity + 4))),
        block_size=block_size,
        max_num_seqs=draw(st.integers(1, 8)),
        max_num_batched_tokens=draw(st.integers(1, 64)),
        policy=chosen,
        enable_prefix_caching=draw(st.integers(0, 7)) > 0,
        hash_bits=draw(st.sampled_from((64, 64, 1, 2, 4, 8))),
        async_scheduling=is_async,
        **options,
    )


@st.composite
def prompts(draw: st.DrawFn, block_size: int, vocabulary: int) -> list[int]:
    """Prompts that share prefixes of k*B-1, k*B and k*B+1 tokens."""
    length = max(1, draw(st.integers(1, 3)) * block_size + draw(st.sampled_from((-1, 0, 1))))
    # Two families of prefixes are enough to meet in the cache.
    family = draw(st.integers(0, 1))
    prefix = [(place * (family + 1)) % vocabulary for place in range(length)]
    tail = draw(st.lists(st.integers(0, vocabulary - 1), max_size=block_size + 1))
    return prefix + tail


@st.composite
def request_specs(
    draw: st.DrawFn, request_id: int, config: KernelConfig, vocabulary: int
) -> dict[str, Any]:
    """The body of an add operation."""
    prompt = draw(
        st.one_of(
            prompts(config.block_size, vocabulary),
            st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=10),
        )
    )
    spec: dict[str, Any] = {
        "id": request_id,
        "prompt": prompt,
        "max_tokens": draw(st.integers(1, 12)),
    }
    if draw(st.booleans()):
        spec["stops"] = [draw(st.integers(0, vocabulary - 1))]
        spec["min_tokens"] = draw(st.integers(0, min(2, spec["max_tokens"])))
    if draw(st.integers(0, 7)) == 0:
        spec["keys"] = [[draw(st.sampled_from(("salt", "adapter"))), "x"]]
    spec["seed"] = draw(st.integers(0, 2))
    return spec
