"""A step's work as a row of numbers, the form that fitted models see it in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.cost.features import StepFeatures

Floats = NDArray[np.float64]
# After this share of the prefill tokens before the last step, a step still feels it.
RECENT_DECAY = 0.7

WORK_COLUMNS = (
    "num_decodes",
    "num_chunks",
    "chunk_tokens",
    "decode_context",
    "shared_context",
    "chunk_context",
    "chunk_pairs",
    "num_sampled",
    "recent_prefill",
)


def work_row(features: StepFeatures, recent_prefill: float) -> list[float]:
    """The work columns of one step."""
    return [
        features.num_decodes,
        len(features.chunks),
        features.num_chunk_tokens,
        features.decode_context_sum,
        features.kv_shared_tokens,
        features.chunk_context_sum,
        features.chunk_attention_pairs,
        features.num_sampled,
        recent_prefill,
    ]


def next_recent(recent: float, chunk_tokens: int) -> float:
    """The `recent_prefill` of the step after one with that many prompt tokens."""
    return (recent + chunk_tokens) * RECENT_DECAY
