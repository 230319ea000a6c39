"""The group of ranks that one model is split over; it never creates or destroys processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.core.errors import ConfigError


class FastAllReduce(Protocol):
    """An all-reduce that beats the process group's for some tensors, the same on every rank."""

    def takes(self, t: Tensor) -> bool: ...  # noqa: D102
    def all_reduce(self, t: Tensor) -> Tensor: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class TpGroup:
    """Rank and size of a tensor-parallel group; with size 1 every collective is a no-op.

    `process_group` is whatever `torch.distributed` made for these ranks (NCCL or gloo); None takes
    the default group. `fast` takes over the sums that it can do.
    """

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None
    fast: FastAllReduce | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError("tensor_parallel_size", self.size, "must be at least 1")
        if not 0 <= self.rank < self.size:
            raise ConfigError("rank", self.rank, f"must be in 0..{self.size - 1}")

    def all_reduce(self, t: Tensor) -> Tensor:
        """Sum over the ranks, in place; returns `t`."""
        if self.fast is not None and self.fast.takes(t):
            return self.fast.all_reduce(t)
        if self.size > 1:
            dist.all_reduce(t, group=self.process_group)
        return t

    def all_reduce_max(self, t: Tensor) -> Tensor:
        """Largest value over the ranks, element by element, in place; returns `t`."""
        if self.size > 1:
            dist.all_reduce(t, op=dist.ReduceOp.MAX, group=self.process_group)
        return t

    def all_gather(self, t: Tensor, dim: int = -1) -> Tensor:
        """Concatenation of every rank's `t` along `dim`, in rank order."""
        if self.size == 1:
            return t
        if t.is_cuda:
            stacked = torch.empty((self.size, *t.shape), dtype=t.dtype, device=t.device)
            dist.all_gather_into_tensor(stacked, t.contiguous(), group=self.process_group)
            return torch.cat(stacked.unbind(0), dim=dim)
        parts = [torch.empty(t.shape, dtype=t.dtype) for _ in range(self.size)]
        dist.all_gather(parts, t.contiguous(), group=self.process_group)
        return torch.cat(parts, dim=dim)
