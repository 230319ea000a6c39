"""The roofline as a sum of terms that are linear in its parameters, for fitting them."""

from __future__ import annotations

from typing import NamedTuple

from sim.cost.features import StepFeatures
from sim.cost.physics import Physics
from sim.cost.roofline import RooflineOptions, layer_exchange_bytes


class StepTerms(NamedTuple):
    """A step's time as a sum: each term is multiplied by one coefficient of the options.

    The first five are times on the data sheet, whose coefficients are 1 / efficiency. Link
    messages, the step itself and its sequences have coefficients in ns.
    """

    memory: float = 0.0
    compute: float = 0.0
    attention_memory: float = 0.0
    attention_compute: float = 0.0
    link: float = 0.0
    messages: float = 0.0
    steps: float = 0.0
    sequences: float = 0.0

    def plus(self, other: StepTerms) -> StepTerms:
        """The sum of two."""
        return StepTerms(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def time_ns(self, coefficients: StepTerms) -> float:
        """The time that the terms take."""
        return sum(term * one for term, one in zip(self, coefficients, strict=True))


def coefficients_of(options: RooflineOptions) -> StepTerms:
    """What the terms of a step are multiplied by."""
    return StepTerms(
        memory=1 / options.memory_efficiency,
        compute=1 / options.compute_efficiency,
        attention_memory=1 / (options.attention_memory_efficiency or options.memory_efficiency),
        attention_compute=1 / options.attention_compute_efficiency,
        link=1 / options.link_efficiency,
        messages=options.link_latency_ns,
        steps=options.host_step_ns,
        sequences=options.host_seq_ns,
    )


def options_of(coefficients: StepTerms) -> RooflineOptions:
    """The inverse of `coefficients_of`."""
    return RooflineOptions(
        memory_efficiency=1 / float(coefficients.memory),
        compute_efficiency=1 / float(coefficients.compute),
        attention_memory_efficiency=1 / float(coefficients.attention_memory),
        attention_compute_efficiency=1 / float(coefficients.attention_compute),
        link_efficiency=1 / float(coefficients.link),
        link_latency_ns=round(coefficients.messages),
        host_step_ns=round(coefficients.steps),
        host_seq_ns=round(coefficients.sequences),
    )


class TermModel:
    """Splits steps into terms; which of two bounds counts depends on the present coefficients."""

    def __init__(self, physics: Physics, options: RooflineOptions) -> None:
        self._physics, self._now = physics, coefficients_of(options)
        self._byte_ns = 1e9 / physics.hardware.memory_bytes_per_s
        self._flop_ns = 1e9 / physics.hardware.flops_per_s
        self._link_byte_ns = 1e9 / physics.hardware.link_bytes_per_s

    def local(self, features: StepFeatures) -> StepTerms:
        """All of a step but its routed experts."""
        physics, tokens = self._physics, features.num_tokens
        terms = self._link(tokens)._replace(steps=1, sequences=features.num_seqs)
        terms = terms.plus(self._products(physics.body_bytes, tokens * physics.token_flops))
        sampled = features.num_sampled
        if sampled:
            terms = terms.plus(self._products(physics.head_bytes, sampled * physics.head_flops))
        for first, count in features.chunks:
            pairs = count * first + count * (count + 1) // 2
            terms = terms.plus(self._attention(first + count, pairs))
        context = features.decode_context_sum
        return terms.plus(self._attention(context, context))

    def experts(self, num_tokens: int) -> StepTerms:
        """The routed experts of all layers."""
        physics = self._physics
        num_bytes = physics.model.routed_share(num_tokens) * physics.expert_bytes
        flops = num_tokens * physics.expert_token_flops
        return StepTerms(memory=num_bytes * self._byte_ns, compute=flops * self._flop_ns)

    def exchange(self, num_tokens: int, num_replicas: int) -> StepTerms:
        """Sending tokens to the experts of other replicas and back."""
        model = self._physics.model
        if num_replicas == 1:
            return StepTerms()
        num_bytes = layer_exchange_bytes(model) * num_tokens * (num_replicas - 1)
        return StepTerms(link=num_bytes * self._link_byte_ns, messages=2 * model.num_layers)

    def _link(self, num_tokens: int) -> StepTerms:
        model, tp = self._physics.model, self._physics.tp
        if tp == 1:
            return StepTerms()
        num_bytes = layer_exchange_bytes(model) * num_tokens * 2 * (tp - 1) / tp
        return StepTerms(link=num_bytes * self._link_byte_ns, messages=2 * model.num_layers)

    def _products(self, num_bytes: int, flops: int) -> StepTerms:
        memory, compute = num_bytes * self._byte_ns, flops * self._flop_ns
        if memory * self._now.memory >= compute * self._now.compute:
            return StepTerms(memory=memory)
        return StepTerms(compute=compute)

    def _attention(self, num_tokens: int, pairs: int) -> StepTerms:
        memory = num_tokens * self._physics.kv_token_bytes * self._byte_ns
        compute = pairs * self._physics.pair_flops * self._flop_ns
        if memory * self._now.attention_memory >= compute * self._now.attention_compute:
            return StepTerms(attention_memory=memory)
        return StepTerms(attention_compute=compute)
