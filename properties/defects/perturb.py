"""Legal perturbations of the kernel, seeded: decisions change, outputs must not (LAW-E3).

The kernel has no switch for them; each is a subclass of one of its parts. A workload draws which
points are active, so that rare combinations are met too.
"""

from __future__ import annotations

from random import Random

from engine.core.block_manager import BlockManager, Hits
from engine.core.config import KernelConfig
from engine.core.plan import StepPlan
from engine.core.policies.mixed import MixedPolicy
from engine.core.policies.prefill_first import PrefillFirstPolicy
from engine.core.policies.priority import PriorityPolicy
from engine.core.sequence import Sequence
from engine.core.state import KernelState
from engine.core.step import Step
from properties.defects.planting import Planted

POINTS = ("refuse", "victim", "evict", "split", "miss")


class _Dice:
    """The seeded choices of one run."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.active = {point for point in POINTS if self.rng.random() < 0.5}
        self.refused = False
        # Of this step, by tokens that are left and budget: who asks for blocks and who takes them
        # must hear the same.
        self.splits: dict[tuple[int, int], int] = {}

    def roll(self, point: str, chance: float) -> bool:
        """Whether a point acts now."""
        return point in self.active and self.rng.random() < chance


class _PerturbedManager(BlockManager):
    dice: _Dice

    def lookup(self, sequence: Sequence) -> Hits:
        """`miss`: a lookup may find less than there is."""
        hits = super().lookup(sequence)
        if not hits.block_ids or not self.dice.roll("miss", 0.3):
            return hits
        kept = hits.block_ids[: self.dice.rng.randrange(len(hits.block_ids))]
        free = sum(1 for block in kept if self.pool.ref_count(block) == 0)
        fresh = sum(
            1 for block in kept if block in self.cached_in_step and self.pool.ref_count(block)
        )
        return Hits(kept, free, fresh)


class _PerturbedMixed(MixedPolicy):
    dice: _Dice

    def _needed(self, state: KernelState, sequence: Sequence, hits: Hits, budget: int) -> int:
        """`refuse`: an admission may fail once although it fits, while something runs."""
        needed = super()._needed(state, sequence, hits, budget)
        if state.running and self.dice.roll("refuse", 0.3):
            return needed + state.config.num_blocks
        return needed

    def _chunk(self, state: KernelState, remaining: int, budget: int) -> int:
        """`split`: a chunk may end early."""
        count = super()._chunk(state, remaining, budget)
        splits = self.dice.splits
        if (remaining, budget) not in splits:
            is_split = count > 1 and self.dice.roll("split", 0.3)
            splits[remaining, budget] = self.dice.rng.randint(1, count) if is_split else count
        return min(count, splits[remaining, budget])


class _PerturbedPriority(PriorityPolicy, _PerturbedMixed):
    pass


class _PerturbedPrefillFirst(PrefillFirstPolicy):
    dice: _Dice

    def _needed(self, state: KernelState, sequence: Sequence, hits: Hits) -> int:
        """`refuse`, as above."""
        needed = super()._needed(state, sequence, hits)
        if state.running and self.dice.roll("refuse", 0.3):
            return needed + state.config.num_blocks
        return needed


class Perturbed(Planted):
    """The kernel with a set of perturbation points; their seed comes from the configuration."""

    manager_class = _PerturbedManager
    mixed_class = _PerturbedMixed
    prefill_first_class = _PerturbedPrefillFirst
    priority_class = _PerturbedPriority

    def __init__(self, config: KernelConfig) -> None:
        super().__init__(config)
        sizes = (config.num_blocks, config.block_size, config.max_num_seqs, config.max_model_len)
        self.dice = _Dice(sum(size * 31**place for place, size in enumerate(sizes)))
        for part in (self.state.manager, self.policy):
            part.dice = self.dice  # type: ignore[union-attr]

    def _begin_step(self, tokens_open: bool) -> Step:
        """`evict` and `victim`: before a step, a free block loses its key, a request its blocks."""
        self.dice.splits.clear()
        pool = self.state.manager.pool
        keyed = [block for block in pool.free_order() if pool.node_of(block) is not None]
        if keyed and self.dice.roll("evict", 0.3):
            pool.unregister(self.dice.rng.choice(keyed))
        step = super()._begin_step(tokens_open)
        running = list(self.state.running.values())
        # Under prefill_first the victim would come back in the very same step (LAW-S6).
        if self.config.policy == "mixed" and len(running) > 1 and self.dice.roll("victim", 0.1):
            victim = self.dice.rng.choice(running[1:])
            self.state.preempt(victim)
            step.preempted.append(victim)
        return step

    def calm(self) -> None:
        """Ends the perturbations: the liveness phase is judged without them."""
        self.dice.active.clear()

    def decode_horizon(self, plan: StepPlan) -> int:
        """Nothing is certain here."""
        return 1
