"""What a server did: busy time, batches, KV use, work, and steps that beat physics."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core.plan import NewBlocks
from sim.cost.features import StepFeatures
from sim.cost.physics import Physics, StepWork
from sim.metrics.timeline import Timeline
from sim.metrics.token_gaps import GapPool

SECOND_NS = 10**9


@dataclass(slots=True)
class Stage:
    """Exact sums over the steps of one kind."""

    num_steps: int = 0
    busy_ns: int = 0
    num_tokens: int = 0
    flops: int = 0
    num_bytes: int = 0

    def merge(self, other: Stage) -> None:
        """Adds the sums of another stage."""
        self.num_steps += other.num_steps
        self.busy_ns += other.busy_ns
        self.num_tokens += other.num_tokens
        self.flops += other.flops
        self.num_bytes += other.num_bytes


@dataclass(slots=True)
class FloorBreak:
    """Steps that were simulated faster than the data sheet allows."""

    count: int = 0
    worst_ratio: float = 1.0
    worst: str = ""


@dataclass(slots=True)
class ServerStats:
    """Sums of one server; `decode` are its pure decode steps, `prefill` all others."""

    physics: Physics
    num_blocks: int
    check_floor: bool = True
    decode: Stage = field(default_factory=Stage)
    prefill: Stage = field(default_factory=Stage)
    gaps: GapPool = field(default_factory=GapPool)
    kv_block_ns: int = 0
    kv_peak_blocks: int = 0
    batch_steps: dict[int, int] = field(default_factory=dict)
    running_ns: int = 0
    hit_tokens: int = 0
    host_hit_tokens: int = 0
    queried_tokens: int = 0
    first_hit_tokens: int = 0
    first_queried_tokens: int = 0
    tokens_per_second: array[int] = field(default_factory=lambda: array("q"))
    floor: FloorBreak = field(default_factory=FloorBreak)
    last_end_ns: int = 0
    timeline: Timeline = field(
        default_factory=lambda: Timeline(("running", "waiting", "kv_blocks", "output_tokens"))
    )

    @property
    def busy_ns(self) -> int:
        """Time in which a step ran."""
        return self.decode.busy_ns + self.prefill.busy_ns

    @property
    def num_steps(self) -> int:
        """Steps of both kinds."""
        return self.decode.num_steps + self.prefill.num_steps

    def add_steps(
        self,
        features: StepFeatures,
        start_ns: int,
        ends_ns: Sequence[int],
        queues: tuple[int, int],
        used_blocks: int,
        new_blocks: Sequence[tuple[int, NewBlocks]] = (),
    ) -> None:
        """Books one step, or a stretch of pure decode steps that begins with `features`.

        `queues` are the running and waiting requests, `used_blocks` those in use in the first
        step; `new_blocks` (with offsets above 0) are taken later in the stretch.
        """
        assert start_ns >= self.last_end_ns, "LAW-M5: steps of one server never overlap"
        steps, end_ns = len(ends_ns), ends_ns[-1]
        busy_ns = end_ns - start_ns
        self.last_end_ns = end_ns
        stage = self.prefill if features.chunks else self.decode
        stage.num_steps += steps
        stage.busy_ns += busy_ns
        stage.num_tokens += features.num_tokens * steps
        self._add_work(stage, features, start_ns, ends_ns)
        batch = features.num_seqs
        self.batch_steps[batch] = self.batch_steps.get(batch, 0) + steps
        self.running_ns += queues[0] * busy_ns
        block_ns = used_blocks * busy_ns
        for offset, (_, _, block_ids) in new_blocks:
            if offset:
                block_ns += len(block_ids) * (end_ns - ends_ns[offset - 1])
                used_blocks += len(block_ids)
        self.kv_block_ns += block_ns
        self.kv_peak_blocks = max(self.kv_peak_blocks, used_blocks)
        self._add_tokens(features.num_sampled, ends_ns)
        rate = features.num_sampled * steps * SECOND_NS / busy_ns
        self.timeline.add(start_ns, end_ns, (*queues, block_ns / busy_ns, rate))

    def _add_tokens(self, num_sampled: int, ends_ns: Sequence[int]) -> None:
        """Counts sampled tokens in the whole second in which their step ended."""
        buckets = self.tokens_per_second
        begin, count = 0, len(ends_ns)
        while begin < count:
            second = ends_ns[begin] // SECOND_NS
            if second >= len(buckets):
                buckets.extend([0] * (second + 1 - len(buckets)))
            stop = bisect_left(ends_ns, (second + 1) * SECOND_NS, begin)
            buckets[second] += num_sampled * (stop - begin)
            begin = stop

    def _add_work(
        self, stage: Stage, features: StepFeatures, start_ns: int, ends_ns: Sequence[int]
    ) -> None:
        physics, steps = self.physics, len(ends_ns)
        first = physics.step_work(features)
        growth = physics.run_growth(features.num_decodes)
        pairs = steps * (steps - 1) // 2
        stage.flops += first.flops * steps + growth.flops * pairs
        stage.num_bytes += first.num_bytes * steps + growth.num_bytes * pairs
        if not self.check_floor:
            return
        # The floor grows along a stretch, so in most cases one comparison settles all steps.
        last = _grown(first, growth, steps - 1)
        before = start_ns
        shortest = ends_ns[-1] - start_ns
        if steps > 1:
            for end in ends_ns:
                shortest = min(shortest, end - before)
                before = end
        if physics.floor_ns(last) > shortest + 1:
            self._find_breaks(first, growth, features, start_ns, ends_ns)

    def _find_breaks(
        self,
        first: StepWork,
        growth: StepWork,
        features: StepFeatures,
        start_ns: int,
        ends_ns: Sequence[int],
    ) -> None:
        before = start_ns
        for offset, end in enumerate(ends_ns):
            floor_ns = self.physics.floor_ns(_grown(first, growth, offset))
            duration_ns, before = end - before, end
            if floor_ns <= duration_ns + 1:
                continue
            self.floor.count += 1
            ratio = duration_ns / floor_ns
            if ratio < self.floor.worst_ratio:
                self.floor.worst_ratio = ratio
                self.floor.worst = (
                    f"{features.num_decodes} decodes and {features.num_chunk_tokens} prompt tokens"
                    f" in {duration_ns / 1e6:.4f} ms, the data sheet allows {floor_ns / 1e6:.4f} ms"
                )


def _grown(first: StepWork, growth: StepWork, steps: int) -> StepWork:
    return StepWork(first.num_bytes + steps * growth.num_bytes, first.flops + steps * growth.flops)
