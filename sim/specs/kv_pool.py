"""Size of the KV pool, computed as the engine does: memory - weights - activations."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.errors import ConfigError
from sim.specs.hardware import Hardware
from sim.specs.models import ModelShape

# Context of the driver, libraries and captured graphs.
_RUNTIME_BYTES = 1 << 30
# Float32 logits, their softmax and the sampler's noise.
_LOGIT_COPIES = 3


@dataclass(frozen=True, slots=True)
class KvPool:
    """The pool of one rank; all ranks have the same."""

    num_blocks: int
    block_bytes: int
    weight_bytes: int
    activation_bytes: int


def blocks_per_sequence(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens`, the last one perhaps in part."""
    return -(-num_tokens // block_size)


def size_kv_pool(
    model: ModelShape,
    hardware: Hardware,
    *,
    tp: int = 1,
    expert_ranks: int | None = None,
    block_size: int = 16,
    utilisation: float = 0.9,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 256,
) -> KvPool:
    """The KV pool that fits beside weights and the largest step's activations.

    `expert_ranks` GPUs hold the experts of a mixture of experts, by default the `tp` of a replica.

    Raises:
        ConfigError: not even one block fits.
    """
    model.check_tp(tp)
    if not 0 < utilisation <= 1:
        raise ConfigError("gpu_memory_utilization", utilisation, "must be above 0 and at most 1")
    routed_bytes = model.routed_bytes
    weight_bytes = -(-(model.weight_bytes - routed_bytes) // tp)
    weight_bytes += -(-routed_bytes // (expert_ranks or tp))
    widths = 2 * model.hidden_size + -(-3 * model.mlp_width // tp)
    widths += -(-(model.num_heads + 2 * model.num_kv_heads) * model.head_dim // tp)
    activation_bytes = _RUNTIME_BYTES + max_num_batched_tokens * widths * model.dtype_bytes
    num_logits = min(max_num_seqs, max_num_batched_tokens) * -(-model.vocab_size // tp)
    activation_bytes += num_logits * 4 * _LOGIT_COPIES
    block_bytes = block_size * model.kv_bytes_per_token(tp)
    usable = int(hardware.memory_bytes * utilisation)
    left = usable - weight_bytes - activation_bytes
    if left < block_bytes:
        raise ConfigError(
            "model",
            model.name,
            f"weights {weight_bytes / 1e9:.1f} GB and activations {activation_bytes / 1e9:.1f} GB"
            f" leave no KV block in {usable / 1e9:.1f} GB of {hardware.name} at tp={tp}",
        )
    return KvPool(left // block_bytes, block_bytes, weight_bytes, activation_bytes)
