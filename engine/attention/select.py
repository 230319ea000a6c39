"""Choice of the attention backend by name, or by what the machine and the block size allow."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.attention.base import AttentionBackend
from engine.attention.flash_backend import FlashAttention
from engine.attention.torch_backend import TorchAttention
from engine.attention.triton_backend import TritonAttention
from engine.core.errors import ConfigError

BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "triton": TritonAttention,
    "flash_attn": FlashAttention,
    "torch": TorchAttention,
}  # in the order in which "auto" tries them: the fastest measured first (docs/benchmarks.md)


def select_backend(
    name: str, head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device | str
) -> AttentionBackend:
    """The backend called `name`, checked against the sizes; "auto" takes the first that fits."""
    device = torch.device(device)
    if name == "auto":
        for make in BACKENDS.values():
            backend = make()
            try:
                backend.check(head_dim, block_size, dtype, device)
            except ConfigError:
                continue
            return backend
    if name not in BACKENDS:
        raise ConfigError("attention_backend", name, f"must be auto or one of {list(BACKENDS)}")
    backend = BACKENDS[name]()
    backend.check(head_dim, block_size, dtype, device)
    return backend
