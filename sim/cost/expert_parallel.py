"""Replicas that share the experts of a mixture: each step of one waits for those of the others."""

from __future__ import annotations

from dataclasses import dataclass

from sim.cost.features import StepFeatures
from sim.cost.roofline import RooflineCost, layer_exchange_bytes


@dataclass(slots=True)
class ExpertGroup:
    """The newest step of each replica; None before its first."""

    newest: list[StepFeatures | None]

    @property
    def steps(self) -> list[StepFeatures]:
        """The steps that are known."""
        return [step for step in self.newest if step is not None]


class ExpertParallelCost:
    """Cost of one of several data parallel replicas whose experts are spread over all of them.

    Attention and all else but the routed experts run on the replica's own GPUs. In each layer the
    replicas exchange their tokens, so a step lasts as long as that of the slowest replica; what the
    others do is taken from the step that each began last. There is no `decode_run_ns`, since a
    stretch of steps is not known in advance.
    """

    name = "roofline"

    def __init__(self, roofline: RooflineCost, group: ExpertGroup, index: int) -> None:
        self.group = group
        self._roofline, self._index = roofline, index
        self.trust = roofline.trust
        options, hardware = roofline.options, roofline.physics.hardware
        link_bytes_per_ns = hardware.link_bytes_per_s * options.link_efficiency / 1e9
        model, others = roofline.physics.model, len(group.newest) - 1
        self._exchange_token_ns = layer_exchange_bytes(model) * others / link_bytes_per_ns
        messages = 2 * model.num_layers if others else 0
        self._exchange_ns = float(messages * options.link_latency_ns)

    def step_time_ns(self, features: StepFeatures) -> int:
        """Duration of the step that this replica begins now."""
        self.group.newest[self._index] = features
        steps = self.group.steps
        tokens = [step.num_tokens for step in steps]
        shared_ns = self._roofline.experts_ns(sum(tokens))
        shared_ns += self._exchange_ns + max(tokens) * self._exchange_token_ns
        return max(1, int(max(self._roofline.time_ns(step, shared_ns) for step in steps)))

    def describe(self) -> dict[str, object]:
        """Name, options, and how many replicas share the experts."""
        return {**self._roofline.describe(), "expert_parallel": len(self.group.newest)}


def expert_parallel_costs(
    roofline: RooflineCost, num_replicas: int
) -> tuple[ExpertParallelCost, ...]:
    """The costs of a group of replicas."""
    group = ExpertGroup([None] * num_replicas)
    return tuple(ExpertParallelCost(roofline, group, index) for index in range(num_replicas))
