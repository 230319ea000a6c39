"""Size of the KV pool: pure arithmetic on measured bytes, and the pool's allocation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.core.errors import ConfigError, LockstepError

if TYPE_CHECKING:
    import torch

GIB = 1024**3


class OutOfMemoryAtStart(LockstepError):
    """The device cannot hold weights, activations and one full-length request."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """Sizes of one rank's pool."""

    num_layers: int
    block_size: int
    num_kv_heads: int  # of this rank
    head_dim: int
    dtype_bytes: int  # of the KV cache, which may be smaller than the activations'

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        per_token = self.num_kv_heads * self.head_dim * self.dtype_bytes
        return 2 * self.num_layers * self.block_size * per_token


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Measured bytes of one device.

    `other_bytes` is what the device holds outside this engine's allocator: the driver's context
    and other processes. The peaks count on top of `weight_bytes`; they never coincide, so only
    the larger one is needed. Graphs keep their memory, so `graph_bytes` counts in full.
    """

    total_bytes: int
    other_bytes: int
    weight_bytes: int
    prefill_peak_bytes: int
    sampling_peak_bytes: int
    graph_bytes: int

    def kv_budget_bytes(self, utilization: float) -> int:
        """Bytes left for the pool; negative if even the rest does not fit (BUG-C64)."""
        peak_bytes = max(self.prefill_peak_bytes, self.sampling_peak_bytes)
        used = self.other_bytes + self.weight_bytes + peak_bytes + self.graph_bytes
        return int(self.total_bytes * utilization) - used

    def describe(self, utilization: float) -> str:
        """The numbers of the budget, for error messages and the log."""
        return (
            f"{_gib(self.total_bytes)} x gpu_memory_utilization={utilization}, "
            f"minus {_gib(self.other_bytes)} used by others, {_gib(self.weight_bytes)} weights, "
            f"{_gib(max(self.prefill_peak_bytes, self.sampling_peak_bytes))} activation peak "
            f"and {_gib(self.graph_bytes)} CUDA graphs"
        )


def num_blocks_in(budget_bytes: int, shape: KvShape, why: str) -> int:
    """Blocks that the budget holds.

    Raises:
        OutOfMemoryAtStart: not a single block fits; `why` says where the budget came from.
    """
    num_blocks = budget_bytes // shape.block_bytes
    if num_blocks < 1:
        raise OutOfMemoryAtStart(
            f"no memory for the KV cache: {_gib(budget_bytes)} left ({why}), "
            f"one block of {shape.block_size} tokens needs {shape.block_bytes:,} bytes"
        )
    return num_blocks


def agreed_num_blocks(per_rank: list[int]) -> int:
    """The pool size that every rank can hold (BUG-C07)."""
    return min(per_rank)


def fit_model_len(requested: int | None, model_limit: int, num_blocks: int, block_size: int) -> int:
    """The `max_model_len` to run with.

    A requested length that the pool cannot hold is refused; a length taken from the model's own
    limit is lowered to what the pool holds.
    """
    capacity = num_blocks * block_size
    if requested is None:
        return max(2, min(model_limit, capacity))
    if requested > capacity:
        raise ConfigError(
            "max_model_len",
            requested,
            f"the KV cache holds {num_blocks} blocks of {block_size} = {capacity} tokens; lower "
            "max_model_len, or raise gpu_memory_utilization or num_kvcache_blocks",
        )
    return requested


def table_width(max_model_len: int, block_size: int) -> int:
    """Columns of a block table: the last position of a full-length sequence has one (BUG-C09)."""
    return -(-max_model_len // block_size)


def allocate_pool(
    shape: KvShape, num_blocks: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The pool `[2, layers, blocks, block_size, kv_heads, head_dim]`.

    It starts as zeros: a masked-out value still takes part in 0 * value, which must not be NaN.

    Raises:
        OutOfMemoryAtStart: the allocator refuses.
    """
    import torch

    dims = (
        2,
        shape.num_layers,
        num_blocks,
        shape.block_size,
        shape.num_kv_heads,
        shape.head_dim,
    )
    try:
        return torch.zeros(dims, dtype=dtype, device=device)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        raise OutOfMemoryAtStart(
            f"the KV cache of {num_blocks} blocks x {shape.block_bytes:,} bytes = "
            f"{_gib(num_blocks * shape.block_bytes)} cannot be allocated on {device}: {error}"
        ) from error


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
