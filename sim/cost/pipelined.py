"""The calibrated cost model of an asynchronous engine: device times with a host beside them."""

from __future__ import annotations

import math
import random
import statistics

from sim.cost.calibrated import MAX_OUTSIDE, OutOfRange
from sim.cost.device_terms import decode_row, dot, kv_reads, prompt_row
from sim.cost.features import StepFeatures
from sim.cost.host_speed import Drifting
from sim.cost.noise import Replicate, student_quantile
from sim.cost.physics import Physics
from sim.cost.pipeline import Host
from sim.cost.pipeline_profile import PipelineProfile
from sim.cost.terms import SHARED_READ_COST
from sim.cost.trust import Trust
from sim.cost.work import RECENT_DECAY

_KV_READ = 2  # its place in DECODE_TERMS
_RECENT = 3
_PROMPT_KV_READ = 3  # its place in PROMPT_TERMS


class PipelinedCost:
    """Device times of a profile; one object per server, since it remembers recent prefill.

    No time lies below the data sheet's limit. Steps that ran outside the calibrated range are
    counted in `num_extrapolated`. `scale` multiplies all device times; with a `seed` the host's
    speed drifts around `host_level`, else its launches vary evenly.
    """

    name = "calibrated"

    def __init__(
        self,
        profile: PipelineProfile,
        physics: Physics,
        *,
        scale: float = 1.0,
        host_level: float = 1.0,
        seed: int | None = None,
        shared_read_cost: float = SHARED_READ_COST,
    ) -> None:
        self.profile = profile
        self.num_steps = self.num_extrapolated = 0
        self._physics, self._scale, self._shared = physics, scale, shared_read_cost
        terms, drift = profile.host, profile.drift
        speed = None
        if seed is not None:
            memory_ns = drift.memory_ms * 1e6
            speed = Drifting(terms.launch_spread, memory_ns, drift.slow_share, seed, host_level)
        self.host = Host(terms, speed)
        self._recent = 0.0
        self._kv_ns = profile.decode_ns[_KV_READ] / 1e3
        self._recent_ns = profile.decode_ns[_RECENT] / 1e3
        self._fixed: dict[int, float] = {}

    def step_time_ns(self, features: StepFeatures) -> int:
        """The device's time of the next step."""
        chunk_tokens = features.num_chunk_tokens if features.chunks else 0
        if chunk_tokens:
            step_ns = self._prompt_ns(features)
        else:
            reads = kv_reads(features, self._shared)
            step_ns = self._fixed_ns(features.num_decodes) + reads * self._kv_ns
            step_ns += self._recent * self._recent_ns
        self._recent = (self._recent + chunk_tokens) * RECENT_DECAY
        self.num_steps += 1
        if self._is_outside(features):
            self.num_extrapolated += 1
        floor_ns = self._physics.floor_ns(self._physics.step_work(features))
        return int(max(step_ns * self._scale, floor_ns)) + 1

    def check_range(self) -> None:
        """Raises OutOfRange where too many steps were outside the calibrated range."""
        if self.num_extrapolated > MAX_OUTSIDE * self.num_steps:
            share = self.num_extrapolated / self.num_steps
            limits = ", ".join(f"{limit:,} {name}" for name, limit in self.profile.limits.items())
            raise OutOfRange(
                f"cost=calibrated: {share:.1%} of {self.num_steps:,} steps lie outside the range"
                f" that {self.profile.path or 'the profile'} was calibrated in (up to {limits});"
                f" at most {MAX_OUTSIDE:.0%} are allowed, use cost=roofline",
                self.name,
                f"{share:.0%} of {self.num_steps:,} steps outside its range",
            )

    @property
    def trust(self) -> Trust:
        """The errors of free-running simulations of its logs, each with a fit to the others."""
        return self.profile.trust

    def describe(self) -> dict[str, object]:
        """Name and provenance of the profile."""
        profile = self.profile
        return {
            "name": self.name,
            "profile": profile.path,
            "engine": profile.target.engine,
            "hardware": profile.target.hardware,
            "scheduling": "asynchronous",
            "sources": [source["name"] for source in profile.sources],
            "calibrated_up_to": dict(profile.limits),
            "held_out": [dict(fold) for fold in profile.held_out],
        }

    def _fixed_ns(self, num_rows: int) -> float:
        """What all decode steps with so many rows share."""
        fixed = self._fixed.get(num_rows)
        if fixed is None:
            row = decode_row(StepFeatures(num_rows, 0, (), num_rows), 0.0, self.profile.graphs)
            fixed = self._fixed[num_rows] = dot(row, self.profile.decode_ns)
        return fixed

    def _prompt_ns(self, features: StepFeatures) -> float:
        row = prompt_row(features, self._recent, self.profile.graphs)
        row[_PROMPT_KV_READ] = kv_reads(features, self._shared) / 1e3
        return dot(row, self.profile.prompt_ns)

    def _is_outside(self, features: StepFeatures) -> bool:
        limits, context = self.profile.limits, features.decode_context_sum
        if context > limits["kv_tokens"] or features.num_seqs > limits["sequences"]:
            return True
        if not features.chunks:
            return False
        return (
            features.num_tokens > limits["tokens"]
            or context + features.chunk_context_sum > limits["kv_tokens"]
            or features.chunk_attention_pairs > limits["chunk_pairs"]
        )


def replicate_cost(
    profile: PipelineProfile, physics: Physics, seed: int, replicate: Replicate
) -> PipelinedCost:
    """The cost model of one possible further run: its device, its host, its shared reads.

    Device and host differ from run to run by what the profile's logs differed by from predictions.
    """
    errors, count = profile.run_errors, len(profile.run_errors)
    scale = 1.0
    if count > 1:
        spread = statistics.stdev(errors) * math.sqrt(1 + 1 / count)
        scale = max(0.5, 1 + student_quantile(replicate.level, count - 1) * spread)
    host = random.Random(seed).gauss(0.0, profile.host.run_spread)
    return PipelinedCost(
        profile,
        physics,
        scale=scale,
        host_level=math.exp(host),
        seed=seed,
        shared_read_cost=replicate.shared_read_cost,
    )
