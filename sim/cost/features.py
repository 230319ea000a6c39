"""What a cost model may know about a step, and the protocol that every cost model follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from engine.core.plan import StepPlan


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """The work of one step.

    A context includes the token that the step itself computes: a decode at position p reads
    p + 1 tokens of KV. `chunks` holds (first position, number of tokens) of each prompt part.
    `kv_shared_tokens` counts the context tokens that sit in blocks which several members of the
    batch share, once for each member after the first: they are read once or several times.
    """

    num_decodes: int
    decode_context_sum: int
    chunks: tuple[tuple[int, int], ...]
    num_sampled: int
    kv_shared_tokens: int = 0

    @property
    def num_chunk_tokens(self) -> int:
        """Prompt tokens that the step computes."""
        return sum(num_tokens for _, num_tokens in self.chunks)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return self.num_decodes + self.num_chunk_tokens

    @property
    def num_seqs(self) -> int:
        """Members of the batch."""
        return self.num_decodes + len(self.chunks)

    @property
    def chunk_context_sum(self) -> int:
        """KV tokens that the chunks read or write, counted once per chunk."""
        return sum(first + num_tokens for first, num_tokens in self.chunks)

    @property
    def chunk_attention_pairs(self) -> int:
        """(query, key) pairs of the chunks' causal attention."""
        return sum(
            num_tokens * first + num_tokens * (num_tokens + 1) // 2
            for first, num_tokens in self.chunks
        )

    @property
    def kv_unique_tokens(self) -> int:
        """KV tokens of the batch with shared blocks counted once."""
        return self.decode_context_sum + self.chunk_context_sum - self.kv_shared_tokens


def plan_features(
    plan: StepPlan, decode_position_sum: int | None = None, kv_shared_tokens: int = 0
) -> StepFeatures:
    """Features of a plan; `decode_position_sum` is the sum of `base_positions` where known."""
    decode, chunks = plan.decode, plan.chunks
    num_decodes = len(decode.request_ids)
    if decode_position_sum is None:
        decode_position_sum = sum(decode.base_positions)
    return StepFeatures(
        num_decodes=num_decodes,
        decode_context_sum=decode_position_sum + num_decodes * (plan.clock + 1),
        chunks=tuple([(chunk.first_position, chunk.num_tokens) for chunk in chunks]),
        num_sampled=num_decodes + sum([chunk.samples for chunk in chunks]),
        kv_shared_tokens=kv_shared_tokens,
    )


@runtime_checkable
class CostModel(Protocol):
    """Time of a step. `name` and `describe()` go into the provenance of a run.

    The simulator calls `step_time_ns` exactly once per step of a server, in order, so a model
    without `decode_run_ns` may keep a position or draw random numbers.
    """

    name: str

    def step_time_ns(self, features: StepFeatures) -> int:
        """Duration of one step, at least 1."""
        ...

    def describe(self) -> dict[str, object]:
        """Plain JSON data that identifies the model and its parameters."""
        ...


@runtime_checkable
class RunCostModel(CostModel, Protocol):
    """A cost model that can time a stretch of pure decode steps at once.

    Its state, if any, changes only in `EngineCostModel.observe`.
    """

    def decode_run_ns(
        self, num_rows: int, context_sum: int, steps: int, kv_shared_tokens: int = 0
    ) -> list[int]:
        """Durations of `steps` pure decode steps; each adds `num_rows` to the context sum.

        Must equal `step_time_ns` of `StepFeatures(num_rows, context_sum + i * num_rows, (),
        num_rows, kv_shared_tokens)` for every i, exactly.
        """
        ...


@runtime_checkable
class EngineCostModel(CostModel, Protocol):
    """A cost model that also knows the engine's work between steps, and may remember steps.

    Its steps are known to have run only when it is told: a planned stretch may be cut short.
    """

    def intake_ns(self, num_prompt_tokens: int) -> int:
        """Time that the engine takes, between two steps, to take in a request."""
        ...

    def observe(self, features: StepFeatures, steps: int) -> None:
        """A step, or `steps` consecutive decode steps that began with `features`, have run."""
        ...
