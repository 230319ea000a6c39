"""What the engine tells its runners to do in one step, and what they answer.

A command is derived from a StepPlan once, by the process that owns the scheduler; every rank then
does exactly the same with it. It names requests by *slot* (a place in the device-side state), so
a runner needs no knowledge of requests.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from engine.requests.committed_step import StepLogprobs


@dataclass(frozen=True, slots=True)
class SlotParams:
    """Sampling parameters that a slot takes over together with its new request."""

    slot: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


@dataclass(frozen=True, slots=True)
class ChunkCommand:
    """A part of a prompt; if it `samples`, its last row yields the slot's next token.

    `prompt_targets` are the prompt's tokens behind each of its first rows whose log probability
    is asked for.
    """

    slot: int
    first_position: int
    token_ids: array[int]
    samples: bool
    prompt_targets: array[int] = field(default_factory=lambda: array("q"))


@dataclass(frozen=True, slots=True)
class BannedTokens:
    """Ids that must not be drawn for one sampled row (min_tokens not reached yet)."""

    row: int  # place among the sampled rows: decodes first, then chunks that sample
    token_ids: array[int]


@dataclass(frozen=True, slots=True)
class StepCommand:
    """One step.

    `decode_slots` and `decode_positions` are None while the decoding rows are those of the step
    before, each one position further: the device then needs nothing new. `table_index` holds
    places in the flattened block tables (slot * width + column) that take `table_blocks`.
    `needs_filters` is False if every sampled row needs a temperature at most.
    """

    step: int
    num_decodes: int
    decode_slots: array[int] | None
    decode_positions: array[int] | None
    table_index: array[int]
    table_blocks: array[int]
    new_slots: tuple[SlotParams, ...] = ()
    chunks: tuple[ChunkCommand, ...] = ()
    needs_filters: bool = False
    num_logprobs: int | None = None
    banned: tuple[BannedTokens, ...] = ()
    num_prompt_logprobs: int | None = None

    @property
    def num_samples(self) -> int:
        """Rows that yield a token."""
        return self.num_decodes + sum(chunk.samples for chunk in self.chunks)

    @property
    def is_plain(self) -> bool:
        """True if sampling needs nothing beyond temperature and seed."""
        return not self.needs_all_logits and not self.banned

    @property
    def needs_all_logits(self) -> bool:
        """True if some row's sampling or log probabilities need its whole distribution."""
        return self.needs_filters or self.num_logprobs is not None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, in sampled-row order (decodes first, then chunks that sample).

    `device_time_ns` is None where the device cannot time itself. The logprob columns hold, per
    row, the sampled token's logprob and rank and the best `num_logprobs` tokens; the prompt's hold
    the same per target of the chunks.
    """

    token_ids: array[int]
    device_time_ns: int | None = None
    logprobs: StepLogprobs | None = None
    prompt_logprobs: StepLogprobs | None = None
