"""How heads, columns and the vocabulary are divided among tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.core.errors import ConfigError

VOCAB_PADDING = 64  # rows; keeps the head's matrix product on aligned sizes


class Shape(Protocol):
    """The part of a model configuration that sharding depends on."""

    @property
    def num_heads(self) -> int: ...  # noqa: D102
    @property
    def num_kv_heads(self) -> int: ...  # noqa: D102
    @property
    def intermediate_size(self) -> int: ...  # noqa: D102
    @property
    def vocab_size(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows [start, start + size) that one rank keeps of a dimension of `full` rows."""

    full: int
    start: int
    size: int


def valid_tp_sizes(shape: Shape) -> list[int]:
    """Tensor-parallel sizes up to 64 that this shape can be split over."""
    return [size for size in range(1, 65) if _is_valid(shape, size)]


def check_tp_size(shape: Shape, size: int) -> None:
    """Raise ConfigError, listing the valid sizes, if the shape cannot be split over `size`."""
    if size < 1 or not _is_valid(shape, size):
        raise ConfigError(
            "tensor_parallel_size",
            size,
            f"must divide {shape.num_heads} heads and intermediate size "
            f"{shape.intermediate_size}, and divide {shape.num_kv_heads} KV heads or be a multiple "
            f"of them; valid sizes: {valid_tp_sizes(shape)}",
        )


def _is_valid(shape: Shape, size: int) -> bool:
    kv_fits = shape.num_kv_heads % size == 0 or size % shape.num_kv_heads == 0
    return shape.num_heads % size == 0 and shape.intermediate_size % size == 0 and kv_fits


def even_shard(full: int, rank: int, size: int) -> Shard:
    """An equal part of `full`, which `size` divides."""
    assert full % size == 0, (full, size)
    return Shard(full, rank * (full // size), full // size)


def kv_head_shard(num_kv_heads: int, rank: int, size: int) -> Shard:
    """The KV heads of a rank: an equal part, or one head that several ranks hold a copy of."""
    if size <= num_kv_heads:
        return even_shard(num_kv_heads, rank, size)
    # Query heads are split contiguously, so neighbours share the KV head of their group.
    return Shard(num_kv_heads, rank // (size // num_kv_heads), 1)


def padded_vocab_rows(vocab_size: int, size: int) -> int:
    """Vocabulary rows that each rank holds, padding included."""
    per_rank = -(-vocab_size // size)
    if size == 1 and per_rank % 8 == 0:
        return per_rank
    return -(-per_rank // VOCAB_PADDING) * VOCAB_PADDING


def vocab_shard(vocab_size: int, rank: int, size: int) -> Shard:
    """The real vocabulary rows of a rank; the last ranks may hold fewer, or none."""
    rows = padded_vocab_rows(vocab_size, size)
    start = min(rank * rows, vocab_size)
    return Shard(vocab_size, start, min(start + rows, vocab_size) - start)
