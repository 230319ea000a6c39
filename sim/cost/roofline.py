"""Analytic cost model: each part of a step is bound by memory or by arithmetic."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from engine.core.errors import ConfigError, InputError
from sim.cost.features import StepFeatures
from sim.cost.physics import Physics
from sim.cost.trust import FITTED_ROOFLINE_TRUST, ROOFLINE_TRUST
from sim.specs.hardware import Hardware
from sim.specs.models import ModelShape


@dataclass(frozen=True, slots=True)
class RooflineOptions:
    """How near to the data sheet kernels come, and what the host adds to a step.

    The defaults are round figures for tuned kernels on large shapes; `lockstep sim calibrate`
    fits a model to recorded steps where more is wanted, `lockstep sim calibrate-requests` fits
    these figures to recorded requests. Attention reads KV at `attention_memory_efficiency`, which
    is `memory_efficiency` where it is None.
    """

    memory_efficiency: float = 0.8
    compute_efficiency: float = 0.65
    attention_compute_efficiency: float = 0.4
    link_efficiency: float = 0.7
    link_latency_ns: int = 8_000
    host_step_ns: int = 300_000
    host_seq_ns: int = 4_000
    attention_memory_efficiency: float | None = None

    def __post_init__(self) -> None:
        for option, value in self.given().items():
            if option.endswith("_efficiency") and not 0 < value <= 1:
                raise ConfigError(option, value, "must be above 0 and at most 1")
            if option.endswith("_ns") and value < 0:
                raise ConfigError(option, value, "must not be negative")

    def given(self) -> dict[str, float]:
        """The options that have a value."""
        return {option: value for option, value in asdict(self).items() if value is not None}


def load_roofline(path: Path) -> RooflineOptions:
    """The options in a file that `save_roofline` wrote.

    Raises:
        InputError: the file is unreadable, or holds something else or impossible values.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable JSON file ({error})") from None
    options = document.get("roofline") if isinstance(document, dict) else None
    if not isinstance(options, dict):
        raise InputError(f"{path}: must hold an object named roofline")
    known = {field.name for field in fields(RooflineOptions)}
    for option, value in options.items():
        if option not in known:
            raise InputError(f"{path}: {option}: must be one of {', '.join(sorted(known))}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{path}: {option}={value!r}: must be a number")
    try:
        return RooflineOptions(**options)
    except ConfigError as error:
        raise InputError(f"{path}: {error}") from None


def layer_exchange_bytes(model: ModelShape) -> int:
    """Activations of one token that all layers exchange, twice in each layer."""
    return 2 * model.num_layers * model.hidden_size * model.dtype_bytes


class RooflineCost:
    """Roofline over matrix products, output head and attention, plus host and all-reduce time.

    The experts of a mixture are read as far as its router, choosing uniformly, is expected to use
    them; `expert_ranks` GPUs hold them.
    """

    name = "roofline"

    def __init__(
        self,
        model: ModelShape,
        hardware: Hardware,
        tp: int = 1,
        options: RooflineOptions | None = None,
        expert_ranks: int | None = None,
        is_fitted: bool = False,
    ) -> None:
        self.trust = FITTED_ROOFLINE_TRUST if is_fitted else ROOFLINE_TRUST
        self.options = options = options or RooflineOptions()
        self.physics = physics = Physics(model, hardware, tp, expert_ranks)
        bytes_per_ns = hardware.memory_bytes_per_s * options.memory_efficiency / 1e9
        flops_per_ns = hardware.flops_per_s * options.compute_efficiency / 1e9
        attention_flops_per_ns = hardware.flops_per_s * options.attention_compute_efficiency / 1e9
        self._body_read_ns = physics.body_bytes / bytes_per_ns
        self._head_read_ns = physics.head_bytes / bytes_per_ns
        self._token_ns = physics.token_flops / flops_per_ns
        self._head_token_ns = physics.head_flops / flops_per_ns
        self._expert_read_ns = physics.expert_bytes / bytes_per_ns
        self._expert_token_ns = physics.expert_token_flops / flops_per_ns
        attention_memory = options.attention_memory_efficiency or options.memory_efficiency
        kv_bytes_per_ns = hardware.memory_bytes_per_s * attention_memory / 1e9
        self._kv_token_ns = physics.kv_token_bytes / kv_bytes_per_ns
        self._pair_ns = physics.pair_flops / attention_flops_per_ns
        self._reduce_token_ns, self._reduce_ns = 0.0, 0.0
        if tp > 1:
            # Two ring all-reduces a layer: each moves 2 (tp - 1) / tp of the activations.
            link_bytes_per_ns = hardware.link_bytes_per_s * options.link_efficiency / 1e9
            self._reduce_token_ns = layer_exchange_bytes(model) * 2 * (tp - 1) / tp
            self._reduce_token_ns /= link_bytes_per_ns
            self._reduce_ns = float(2 * model.num_layers * options.link_latency_ns)

    def step_time_ns(self, features: StepFeatures) -> int:
        """Duration of one step."""
        return max(1, int(self.time_ns(features, self.experts_ns(features.num_tokens))))

    def time_ns(self, features: StepFeatures, experts_ns: float) -> float:
        """Duration of a step whose experts take `experts_ns`."""
        fixed = self._fixed_ns(features.num_tokens, features.num_sampled, features.num_seqs)
        # Attention kernels of decodes and chunks run one after the other.
        chunk_ns = 0.0
        for first, num_tokens in features.chunks:
            pairs = num_tokens * first + num_tokens * (num_tokens + 1) // 2
            chunk_ns += max((first + num_tokens) * self._kv_token_ns, pairs * self._pair_ns)
        decode_ns = self._decode_ns(features.decode_context_sum, features.kv_shared_tokens)
        return fixed + experts_ns + chunk_ns + decode_ns

    def experts_ns(self, num_tokens: int) -> float:
        """Time of the routed experts of all layers for `num_tokens` tokens.

        Each expert gets few of them, too few to do arithmetic while the next weights are read.
        """
        read_ns = self.physics.model.routed_share(num_tokens) * self._expert_read_ns
        return read_ns + num_tokens * self._expert_token_ns

    def decode_run_ns(
        self, num_rows: int, context_sum: int, steps: int, kv_shared_tokens: int = 0
    ) -> list[int]:
        """Durations of consecutive pure decode steps."""
        fixed = self._fixed_ns(num_rows, num_rows, num_rows) + self.experts_ns(num_rows)
        context_sums = range(context_sum, context_sum + num_rows * steps, num_rows)
        if self._pair_ns <= self._kv_token_ns and not kv_shared_tokens:
            token_ns = self._kv_token_ns
            return [max(1, int(fixed + total * token_ns)) for total in context_sums]
        decode_ns = self._decode_ns
        return [max(1, int(fixed + decode_ns(total, kv_shared_tokens))) for total in context_sums]

    def describe(self) -> dict[str, object]:
        """Name and options."""
        return {"name": self.name, **self.options.given()}

    def _decode_ns(self, context_sum: int, shared: int) -> float:
        # Paged attention reads a shared block once for each sequence, so `shared` saves nothing.
        return max(context_sum * self._kv_token_ns, context_sum * self._pair_ns)

    def _fixed_ns(self, num_tokens: int, num_sampled: int, num_seqs: int) -> float:
        body_ns = max(self._body_read_ns, num_tokens * self._token_ns)
        head_ns = max(self._head_read_ns, num_sampled * self._head_token_ns) if num_sampled else 0.0
        reduce_ns = self._reduce_ns + num_tokens * self._reduce_token_ns
        host_ns = self.options.host_step_ns + num_seqs * self.options.host_seq_ns
        return body_ns + head_ns + reduce_ns + host_ns
