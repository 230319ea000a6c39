"""Bytes and FLOPs that a step cannot avoid, and the time they take at data-sheet rates."""

from __future__ import annotations

from dataclasses import dataclass

from sim.cost.features import StepFeatures
from sim.specs.hardware import Hardware
from sim.specs.models import ModelShape


@dataclass(frozen=True, slots=True)
class StepWork:
    """Exact integer work of a step on one rank."""

    num_bytes: int
    flops: int


class Physics:
    """The least work of a step on each of `tp` ranks.

    Weights are read once (the embedding only as far as the head reads it), KV blocks that
    sequences share are read once, activations are free. Of the experts only as many are read as
    one token is routed to, since all tokens may be routed to the same. `expert_ranks` GPUs hold the
    experts (those of the replica, unless replicas share them): the slowest of them has no less
    than the average.
    """

    def __init__(
        self, model: ModelShape, hardware: Hardware, tp: int = 1, expert_ranks: int | None = None
    ) -> None:
        self.model, self.hardware, self.tp = model, hardware, tp
        self.expert_ranks = ranks = tp if expert_ranks is None else expert_ranks
        # Floor divisions keep each figure a lower bound.
        self.body_bytes = model.body_bytes // tp
        self.head_bytes = model.head_bytes // tp
        self.token_flops = wide_flops(model, hardware, model.body_params) // tp
        self.head_flops = 2 * model.head_params // tp
        self.pair_flops = 4 * model.num_layers * model.num_heads * model.head_dim // tp
        self.expert_bytes = model.routed_bytes // ranks
        self.expert_least_bytes = model.token_routed_bytes // ranks
        self.expert_token_flops = wide_flops(model, hardware, model.token_routed_params) // ranks
        self.kv_token_bytes = model.kv_bytes_per_token(tp)

    def step_work(self, features: StepFeatures) -> StepWork:
        """Work of one step."""
        sampled = features.num_sampled
        num_bytes = self.body_bytes + (self.head_bytes if sampled else 0)
        num_bytes += features.kv_unique_tokens * self.kv_token_bytes + self.expert_least_bytes
        pairs = features.decode_context_sum + features.chunk_attention_pairs
        token_flops = self.token_flops + self.expert_token_flops
        flops = features.num_tokens * token_flops + sampled * self.head_flops
        return StepWork(num_bytes, flops + pairs * self.pair_flops)

    def floor_ns(self, work: StepWork) -> float:
        """Shortest time of that work on the data sheet."""
        memory_s = work.num_bytes / self.hardware.memory_bytes_per_s
        return max(memory_s, work.flops / self.hardware.flops_per_s) * 1e9

    def run_growth(self, num_rows: int) -> StepWork:
        """What each further step of a pure decode stretch adds to the work of the one before."""
        return StepWork(num_rows * self.kv_token_bytes, num_rows * self.pair_flops)


def wide_flops(model: ModelShape, hardware: Hardware, num_params: int) -> int:
    """FLOPs of one token in those weights, as many as take as long in 16 bit."""
    flops = 2 * num_params
    speedup = hardware.speedup(model.arithmetic)
    if speedup == 1 or not model.narrow_share:
        return flops
    return int(flops * (1 - model.narrow_share * (1 - 1 / speedup)))
