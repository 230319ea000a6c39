"""The scopes of the exhaustive search: which tiny requests, under which configuration."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from engine.core.config import KernelConfig

Shape = tuple[tuple[int, ...], int]  # prompt, max_tokens
VOCABULARY = 2


@dataclass(frozen=True, slots=True)
class Scope:
    """How much is enumerated."""

    requests: int
    shapes: tuple[Shape, ...]
    stop: bool = True  # token 1 ends a request
    aborts: bool = False
    discards: bool = False
    options: tuple[tuple[str, object], ...] = ()  # of the configuration
    policies: tuple[str, ...] = ("mixed", "prefill_first")

    def config(self, policy: str) -> KernelConfig:
        """The small configuration of this scope."""
        return small_config(policy, **dict(self.options))


def prompts_up_to(length: int) -> tuple[Shape, ...]:
    """All prompts over two tokens up to a length (30 for length 4), two outputs each."""
    return tuple(
        (prompt, 2)
        for size in range(1, length + 1)
        for prompt in product(range(VOCABULARY), repeat=size)
    )


SIX_SHAPES: tuple[Shape, ...] = (
    ((0,), 3),
    ((0, 0), 2),
    ((0, 0, 0), 2),
    ((0, 0, 1), 2),
    ((0, 0, 0, 0), 1),
    ((1, 0, 0, 0, 0), 2),
)
TWO_SHAPES: tuple[Shape, ...] = (((0,), 2), ((0, 0, 0), 2))
ASYNC = (("async_scheduling", True),)
WATERMARK = (("watermark_blocks", 1),)
SCOPES = {
    "2x30": Scope(2, prompts_up_to(4)),
    "3x6": Scope(3, SIX_SHAPES),
    "2x14-abort": Scope(2, prompts_up_to(3), aborts=True),
    "3x30": Scope(3, prompts_up_to(4)),
    "4x6": Scope(4, SIX_SHAPES),
    "2x6-watermark": Scope(2, SIX_SHAPES, options=WATERMARK, policies=("mixed",)),
    "3x6-watermark": Scope(3, SIX_SHAPES, options=WATERMARK, policies=("mixed",)),
    "2x3-discard": Scope(2, SIX_SHAPES[:3], aborts=True, discards=True),
    "3x3-discard": Scope(3, SIX_SHAPES[:3], aborts=True, discards=True),
    "2x2-async": Scope(2, TWO_SHAPES, aborts=True, discards=True, options=ASYNC),
    "2x6-async": Scope(2, SIX_SHAPES, aborts=True, discards=True, options=ASYNC),
    "2x30-async": Scope(2, prompts_up_to(4), options=ASYNC),
    "3x3-async": Scope(3, SIX_SHAPES[:3], options=ASYNC),
}
DEFAULT_SCOPES = (
    "2x30",
    "3x6",
    "2x14-abort",
    "2x6-watermark",
    "2x3-discard",
    "2x2-async",
)


def small_config(policy: str, **options: Any) -> KernelConfig:  # noqa: ANN401
    """Four blocks of two tokens, two seats, a budget of four."""
    sizes = {
        "num_blocks": 4,
        "block_size": 2,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 4,
        "max_model_len": 16,
    }
    return KernelConfig(policy=policy, **{**sizes, **options})
