"""The terms of the calibrated model: physical quantities whose coefficients are times.

Every term grows with the work of a step and every coefficient is at least 0, so the predicted
time is monotone in the work.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

# Above so many tokens the device takes longer than the host needs to launch its kernels.
DEVICE_BOUND_TOKENS = 1536
KINDS = ("decode", "mixed_graph", "mixed_eager", "mixed_large")
# Captured by vLLM 0.25.1 with max_num_seqs=256: full graphs for decode, piecewise ones else.
VLLM_GRAPH_SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
# Between two of these numbers of (padded) tokens the matrix products cost the same per token.
TOKEN_KNOTS = (0, 8, 32, 64, 96, 128, 256, 512, 1024)
# A KV block that several sequences share is read from the L2 cache after the first time. How much
# less that costs than a read from memory depends on hardware and kernel; measured, not fitted
# (benchmarks/records/h200_shared_kv.json): with blocks of 16 tokens, and over all kernels.
SHARED_READ_COST = 0.6
SHARED_READ_RANGE = (0.33, 0.87)


@dataclass(frozen=True, slots=True)
class Term:
    """One term; `unit` is what its coefficient is a time per."""

    name: str
    unit: str
    meaning: str


def _hinge_terms(name: str, knots: tuple[int, ...], meaning: str) -> tuple[Term, ...]:
    ends = [*map(str, knots[1:]), "up"]
    return tuple(
        Term(f"{name}_{start}_{end}", "token", f"{meaning}, tokens {start} to {end}")
        for start, end in zip(knots, ends, strict=True)
    )


STEP_TERMS: tuple[Term, ...] = (
    Term("step", "step", "weights read once, fixed host and launch time"),
    Term("mixed", "step", "steps with prompt chunks: no full graph, prefill kernels"),
    Term("eager", "step", "more tokens than the largest graph: every kernel launched by the host"),
    Term("sequence", "sequence", "host work and sampling per member of the batch"),
    Term("chunk", "chunk", "host work and kernel tails per prompt chunk"),
    Term("kv_read", "1000 tokens", "KV read by decode attention, repeated reads at the L2 rate"),
    Term("chunk_kv", "1000 tokens", "KV read by the chunks' attention"),
    Term("chunk_pairs", "1e6 pairs", "arithmetic of the chunks' attention"),
    Term("recent", "1000 tokens", "after prefill: cold caches, new batch, lower clocks"),
    Term("recent_tokens", "1e6 tokens^2", "lower clocks under sustained prefill, per token"),
    *_hinge_terms("tokens", TOKEN_KNOTS, "matrix products"),
)
HOST_TERMS: tuple[Term, ...] = (
    Term("gap", "step", "host work after a step"),
    Term("sampled", "token", "output processing"),
    Term(
        "sampled_squared",
        "1000 tokens^2",
        "output processing costs more per token in large batches",
    ),
    Term("chunk_tokens", "1000 tokens", "output processing of prompt chunks, booking their blocks"),
    Term("finished", "request", "ending a request"),
    Term("added", "request", "taking in a request"),
    Term("added_tokens", "1000 tokens", "taking in its prompt"),
)
STEP_NAMES = tuple(term.name for term in STEP_TERMS)
HOST_NAMES = tuple(term.name for term in HOST_TERMS)


@dataclass(frozen=True, slots=True)
class Graphs:
    """Which batches run in captured graphs: padded to a size, mixed ones up to `mixed_up_to`."""

    sizes: tuple[int, ...] = ()
    mixed_up_to: int = 0

    def padded(self, num_tokens: int, mixed: bool) -> int:
        """Tokens that the device computes."""
        sizes = self.sizes
        if not sizes or num_tokens > sizes[-1] or (mixed and num_tokens > self.mixed_up_to):
            return num_tokens
        return sizes[bisect_left(sizes, num_tokens)]

    def is_eager(self, num_tokens: int, mixed: bool) -> bool:
        """Whether the host launches every kernel of the step."""
        if not self.sizes:
            return False
        return num_tokens > (min(self.mixed_up_to, self.sizes[-1]) if mixed else self.sizes[-1])


def hinges(value: float, knots: Sequence[int]) -> list[float]:
    """The parts of `value` that lie between neighbouring knots, and beyond the last one."""
    parts = [min(max(value - low, 0), high - low) for low, high in pairwise(knots)]
    parts.append(max(value - knots[-1], 0))
    return parts


def step_row(work: Sequence[float], graphs: Graphs) -> list[float]:
    """The terms of one step, in the order of `STEP_TERMS`."""
    (decodes, chunks, chunk_tokens, decode_context, shared, chunk_context, pairs, _, recent) = work
    tokens = int(decodes + chunk_tokens)
    mixed = chunks > 0
    kv_read = decode_context - min(shared, decode_context) * (1 - SHARED_READ_COST)
    return [
        1.0,
        float(mixed),
        float(graphs.is_eager(tokens, mixed)),
        decodes + chunks,
        chunks,
        kv_read / 1e3,
        chunk_context / 1e3,
        pairs / 1e6,
        recent / 1e3,
        recent * tokens / 1e6,
        *hinges(graphs.padded(tokens, mixed), TOKEN_KNOTS),
    ]


def host_row(
    sampled: float, chunk_tokens: float, finished: float, added: float, added_tokens: float
) -> list[float]:
    """The terms of the gap behind a step, in the order of `HOST_TERMS`."""
    squared = sampled * sampled / 1e3
    return [1.0, sampled, squared, chunk_tokens / 1e3, finished, added, added_tokens / 1e3]


def kind_of(graphs: Graphs, num_tokens: int, mixed: bool) -> int:
    """Index into `KINDS`: kinds of steps whose times scatter in different ways."""
    if not mixed:
        return 0
    if num_tokens >= DEVICE_BOUND_TOKENS:
        return 3
    return 2 if graphs.is_eager(num_tokens, mixed) else 1
