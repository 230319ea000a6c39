"""The calibrated cost model: a profile in use, with or without the noise of real steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.errors import InputError
from sim.cost.features import StepFeatures
from sim.cost.noise import Noise
from sim.cost.physics import Physics
from sim.cost.profile import Profile
from sim.cost.terms import (
    HOST_NAMES,
    SHARED_READ_COST,
    STEP_NAMES,
    Graphs,
    host_row,
    kind_of,
    step_row,
)
from sim.cost.trust import Trust
from sim.cost.work import RECENT_DECAY, next_recent, work_row

# Beyond this share of steps outside the calibrated range a result is refused ...
MAX_OUTSIDE = 0.05
# ... and a run that has most of its first 1,000, 2,000, 4,000 ... steps outside is not waited for.
FIRST_CHECK, EARLY_OUTSIDE = 1_000, 0.5
# Less than a nanosecond of this many recent tokens' effect is left.
_NEGLIGIBLE_TOKENS = 1e-3


@dataclass(slots=True)
class _Rows:
    """What is equal in all pure decode steps with that many rows."""

    fixed_ns: float  # of the step itself
    gap_ns: float  # host work behind it
    recent_ns: float  # per recent prefill token
    floor_ns: float  # the data sheet's limit without context ...
    floor_slope_ns: float  # ... and at most how it grows with each context token
    above_floor: bool  # the prediction is above the limit whatever the context


class OutOfRange(InputError):
    """A run left the range of its cost model, of the kind `kind`; `reason` says it in few words."""

    def __init__(self, message: str, kind: str, reason: str) -> None:
        # SimPy raises errors of its processes anew from their arguments.
        super().__init__(message, kind, reason)
        self.kind = kind
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


class CalibratedCost:
    """Step times of a profile; one object per server, since it remembers recent prefill.

    The time of a step includes the host work behind it, up to the next schedule. No time lies
    below the data sheet's limit. Steps that ran outside the calibrated range are counted in
    `num_extrapolated`.
    """

    name = "calibrated"

    def __init__(self, profile: Profile, physics: Physics, noise: Noise | None = None) -> None:
        self.profile = profile
        self.num_steps = self.num_extrapolated = 0
        self._next_check = FIRST_CHECK
        self._physics, self._noise = physics, noise
        self._graphs: Graphs = profile.graphs
        self._step_ns, self._host_ns = profile.step_ns, profile.host_ns
        step = dict(zip(STEP_NAMES, profile.step_ns, strict=True))
        host = dict(zip(HOST_NAMES, profile.host_ns, strict=True))
        self._kv_ns = step["kv_read"] / 1e3
        shared_read_cost = SHARED_READ_COST if noise is None else noise.shared_read_cost
        self._kv_shared_ns = self._kv_ns * (1 - shared_read_cost)
        self._sequence_ns, self._chunk_ns = step["sequence"], step["chunk"]
        self._chunk_kv_ns, self._pair_ns = step["chunk_kv"] / 1e3, step["chunk_pairs"] / 1e6
        self._recent_ns = step["recent"] / 1e3
        self._recent_token_ns = step["recent_tokens"] / 1e6
        self._by_tokens: dict[int, float] = {}
        self._gaps: dict[int, float] = {}
        # Every request is taken in and ended exactly once.
        self._request_ns = host["added"] + host["finished"]
        self._prompt_token_ns = host["added_tokens"] / 1e3
        self._chunk_gap_ns = host["chunk_tokens"] / 1e3
        self._recent = 0.0
        self._rows: dict[int, _Rows] = {}
        limits = profile.limits
        self._max_seqs, self._max_tokens = limits["sequences"], limits["tokens"]
        self._max_kv, self._max_pairs = limits["kv_tokens"], limits["chunk_pairs"]

    def step_time_ns(self, features: StepFeatures) -> int:
        """Duration of one step, with the host work behind it."""
        if not features.chunks:
            return self.decode_run_ns(
                features.num_decodes, features.decode_context_sum, 1, features.kv_shared_tokens
            )[0]
        step_ns = self._mixed_ns(features)
        if self._noise is not None:
            kind = kind_of(self._graphs, features.num_tokens, True)
            step_ns *= 1 + self._noise.peek(kind, 1)[0]
        floor_ns = self._physics.floor_ns(self._physics.step_work(features))
        return int(max(step_ns, floor_ns) + self._gap_of(features)) + 1

    def decode_run_ns(
        self, num_rows: int, context_sum: int, steps: int, kv_shared_tokens: int = 0
    ) -> list[int]:
        """Durations of consecutive pure decode steps, if they all run from now on."""
        rows = self._rows.get(num_rows) or self._enter(num_rows)
        kv_ns = self._kv_ns
        first = rows.fixed_ns - kv_shared_tokens * self._kv_shared_ns
        contexts = range(context_sum, context_sum + num_rows * steps, num_rows)
        if self._noise is not None or not rows.above_floor:
            return self._checked_run(rows, first, contexts, kv_shared_tokens)
        first += rows.gap_ns + 1
        recent = self._recent
        if not recent:
            return [int(first + context * kv_ns) for context in contexts]
        times = []
        for context in contexts:
            times.append(int(first + context * kv_ns + recent * rows.recent_ns))
            recent = _decayed(recent, 1)
        return times

    def observe(self, features: StepFeatures, steps: int) -> None:
        """Learns that a step, or that many steps of a decode run, have run.

        Raises:
            InputError: most steps so far were outside the calibrated range.
        """
        self.num_steps += steps
        if self._is_outside(features, steps):
            self.num_extrapolated += steps
        if self.num_steps >= self._next_check:
            self._next_check = 2 * self.num_steps
            self._refuse_above(EARLY_OUTSIDE)
        if self._noise is not None:
            kind = kind_of(self._graphs, features.num_tokens, bool(features.chunks))
            self._noise.advance(kind, steps)
        if features.chunks:
            self._recent = next_recent(self._recent, features.num_chunk_tokens)
        elif self._recent:
            self._recent = _decayed(self._recent, steps)

    def intake_ns(self, num_prompt_tokens: int) -> int:
        """Host time between steps for taking in (and later ending) a request."""
        return int(self._request_ns + num_prompt_tokens * self._prompt_token_ns)

    def gap_ns(self, features: StepFeatures) -> int:
        """Host time behind a step."""
        return int(self._gap_of(features))

    def check_range(self) -> None:
        """Raises InputError where too many steps were outside the calibrated range."""
        self._refuse_above(MAX_OUTSIDE)

    def _refuse_above(self, limit: float) -> None:
        if self.num_extrapolated > limit * self.num_steps:
            share = self.num_extrapolated / self.num_steps
            raise OutOfRange(
                f"cost=calibrated: {share:.1%} of {self.num_steps:,} steps lie outside the range"
                f" that {self.profile.path or 'the profile'} was calibrated in (up to"
                f" {self._range_text()}); at most {MAX_OUTSIDE:.0%} are allowed, use cost=roofline",
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
        description: dict[str, object] = {
            "name": self.name,
            "profile": profile.path,
            "engine": profile.target.engine,
            "hardware": profile.target.hardware,
            "sources": [source["name"] for source in profile.sources],
            "calibrated_up_to": dict(profile.limits),
            "held_out": [dict(fold) for fold in profile.held_out],
        }
        if self._noise is not None:
            description["noise"] = self._noise.describe()
        return description

    def _range_text(self) -> str:
        return ", ".join(f"{limit:,} {name}" for name, limit in self.profile.limits.items())

    def _gap_of(self, features: StepFeatures) -> float:
        chunk_ns = features.num_chunk_tokens * self._chunk_gap_ns if features.chunks else 0.0
        return self._gap_ns(features.num_sampled) + chunk_ns

    def _gap_ns(self, num_sampled: int) -> float:
        gap_ns = self._gaps.get(num_sampled)
        if gap_ns is None:
            row = host_row(num_sampled, 0, 0, 0, 0)
            gap_ns = self._gaps[num_sampled] = _dot(row, self._host_ns)
        return gap_ns

    def _mixed_ns(self, features: StepFeatures) -> float:
        """The terms of a step with chunks; those that depend on the tokens alone are kept."""
        tokens, pairs, chunk_context = 0, 0, 0
        for first, num_tokens in features.chunks:
            tokens += num_tokens
            chunk_context += first + num_tokens
            pairs += num_tokens * first + num_tokens * (num_tokens + 1) // 2
        decodes, context, chunks = (
            features.num_decodes,
            features.decode_context_sum,
            features.chunks,
        )
        tokens += decodes
        fixed = self._by_tokens.get(tokens)
        if fixed is None:
            # No sequences, one chunk: only what its tokens cost is left after taking it off.
            work = (0, 1, tokens, 0, 0, 0, 0, 0, 0)
            fixed = _dot(step_row(work, self._graphs), self._step_ns)
            fixed = self._by_tokens[tokens] = fixed - self._sequence_ns - self._chunk_ns
        shared = min(features.kv_shared_tokens, context)
        return (
            fixed
            + (decodes + len(chunks)) * self._sequence_ns
            + len(chunks) * self._chunk_ns
            + context * self._kv_ns
            - shared * self._kv_shared_ns
            + chunk_context * self._chunk_kv_ns
            + pairs * self._pair_ns
            + self._recent * (self._recent_ns + tokens * self._recent_token_ns)
        )

    def _enter(self, num_rows: int) -> _Rows:
        """Computes what all decode steps of a batch size share."""
        empty = StepFeatures(num_rows, 0, (), num_rows)
        fixed, with_recent = (
            _dot(step_row(work_row(empty, recent), self._graphs), self._step_ns)
            for recent in (0.0, 1.0)
        )
        physics, sheet = self._physics, self._physics.hardware
        # Prediction and limits are linear in the context: compare their starts and their slopes.
        slopes = (
            physics.kv_token_bytes / sheet.memory_bytes_per_s * 1e9,
            physics.pair_flops / sheet.flops_per_s * 1e9,
        )
        floor_ns, slope = physics.floor_ns(physics.step_work(empty)), max(slopes)
        above = fixed >= floor_ns and self._kv_ns >= slope
        gap_ns = self._gap_ns(num_rows)
        rows = _Rows(fixed, gap_ns, with_recent - fixed, floor_ns, slope, above)
        self._rows[num_rows] = rows
        return rows

    def _checked_run(self, rows: _Rows, first: float, contexts: range, shared: int) -> list[int]:
        """The same with noise and, step by step, the data sheet's limit."""
        noise = [0.0] * len(contexts)
        if self._noise is not None:
            noise = self._noise.peek(0, len(contexts))
        recent, physics = self._recent, self._physics
        times = []
        for context, error in zip(contexts, noise, strict=True):
            time_ns = (first + context * self._kv_ns + recent * rows.recent_ns) * (1 + error)
            if time_ns < rows.floor_ns + context * rows.floor_slope_ns:
                num_rows = contexts.step
                work = physics.step_work(StepFeatures(num_rows, context, (), num_rows, shared))
                time_ns = max(time_ns, physics.floor_ns(work))
            times.append(int(time_ns + rows.gap_ns + 1))
            recent = _decayed(recent, 1)
        return times

    def _is_outside(self, features: StepFeatures, steps: int) -> bool:
        context = features.decode_context_sum + (steps - 1) * features.num_decodes
        if context > self._max_kv or features.num_seqs > self._max_seqs:
            return True
        if not features.chunks:
            return False
        return (
            features.num_tokens > self._max_tokens
            or context + features.chunk_context_sum > self._max_kv
            or features.chunk_attention_pairs > self._max_pairs
        )


def _dot(terms: Sequence[float], coefficients: Sequence[float]) -> float:
    return sum([a * b for a, b in zip(terms, coefficients, strict=True)])


def _decayed(recent: float, steps: int) -> float:
    for _ in range(steps):
        recent *= RECENT_DECAY
        if recent < _NEGLIGIBLE_TOKENS:
            return 0.0
    return recent
