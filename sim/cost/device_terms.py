"""The device's time of an asynchronous step as a sum of terms, one sum per kind of step.

Pure decode steps run in full graphs and steps with prompts in piecewise graphs or none, with other
kernels, so they share no coefficient. All coefficients are non-negative: more work never takes
less time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from sim.cost.features import StepFeatures
from sim.cost.terms import SHARED_READ_COST, Graphs, Term, hinges

DECODE_KNOTS = (0, 8, 32, 64)
PROMPT_KNOTS = (0, 512, 2048)
# Recorded steps felt recent prefill up to about so many tokens.
MOST_RECENT = 4000.0


def _tokens(knots: tuple[int, ...]) -> tuple[Term, ...]:
    names = [f"tokens_{low}_{high}" for low, high in pairwise(knots)] + [f"tokens_{knots[-1]}_up"]
    return tuple(Term(name, "token", "matrix products by padded tokens") for name in names)


DECODE_TERMS: tuple[Term, ...] = (
    Term("step", "step", "weights read once, fixed kernels"),
    Term("sequence", "sequence", "sampling and attention per sequence"),
    Term("kv_read", "1000 tokens", "KV read by decode attention, repeated reads at the L2 rate"),
    Term("recent", "1000 tokens", "after prefill: cold caches, lower clocks"),
    *_tokens(DECODE_KNOTS),
)
PROMPT_TERMS: tuple[Term, ...] = (
    Term("step", "step", "weights read once, fixed kernels"),
    Term("chunk", "chunk", "kernel tails per prompt chunk"),
    Term("sequence", "sequence", "sampling and attention per decoding sequence"),
    Term("kv_read", "1000 tokens", "KV read by the decodes of the step"),
    Term("chunk_pairs", "1e6 pairs", "arithmetic of the chunks' attention"),
    Term("recent_tokens", "1e6 tokens^2", "lower clocks under sustained prefill, per token"),
    *_tokens(PROMPT_KNOTS),
)


def decode_row(features: StepFeatures, recent: float, graphs: Graphs) -> list[float]:
    """The terms of a pure decode step, in the order of `DECODE_TERMS`."""
    padded = graphs.padded(features.num_decodes, False)
    return [
        1.0,
        features.num_decodes,
        kv_reads(features) / 1e3,
        recent / 1e3,
        *hinges(padded, DECODE_KNOTS),
    ]


def prompt_row(features: StepFeatures, recent: float, graphs: Graphs) -> list[float]:
    """The terms of a step with prompt chunks, in the order of `PROMPT_TERMS`."""
    return [
        1.0,
        len(features.chunks),
        features.num_decodes,
        kv_reads(features) / 1e3,
        features.chunk_attention_pairs / 1e6,
        min(recent, MOST_RECENT) * features.num_tokens / 1e6,
        *hinges(graphs.padded(features.num_tokens, True), PROMPT_KNOTS),
    ]


def kv_reads(features: StepFeatures, shared_read_cost: float = SHARED_READ_COST) -> float:
    """KV tokens that the decodes read; a repeated read of a shared block counts less."""
    context = features.decode_context_sum
    return context - min(features.kv_shared_tokens, context) * (1 - shared_read_cost)


def dot(terms: Sequence[float], coefficients: Sequence[float]) -> float:
    """The sum of the terms times their coefficients."""
    return sum([a * b for a, b in zip(terms, coefficients, strict=True)])
