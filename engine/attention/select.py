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
    name: str,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    kv_dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """The backend called `name`, checked against the sizes; "auto" takes the first that fits.

    `kv_dtype` is that of the KV cache, if it is not `dtype`.
    """
    device = torch.device(device)
    if name == "auto":
        for make in BACKENDS.values():
            backend = make()
            try:
                backend.check(head_dim, block_size, dtype, device)
                _check_kv_dtype(backend, kv_dtype)
            except ConfigError:
                continue
            return backend
    if name not in BACKENDS:
        raise ConfigError("attention_backend", name, f"must be auto or one of {list(BACKENDS)}")
    backend = BACKENDS[name]()
    backend.check(head_dim, block_size, dtype, device)
    _check_kv_dtype(backend, kv_dtype)
    return backend


def _check_kv_dtype(backend: AttentionBackend, kv_dtype: torch.dtype | None) -> None:
    if kv_dtype is not None and kv_dtype.itemsize == 1 and backend.name == "flash_attn":
        text = "the backend flash_attn reads no 8-bit floats; take triton or torch"
        raise ConfigError("kv_cache_dtype", "fp8", text)
