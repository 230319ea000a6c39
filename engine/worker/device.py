"""Start-up facts that do not depend on a loaded model: the device, its memory, the versions."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch

from engine.core.errors import ConfigError
from engine.options import EngineOptions

_REPORTED = ("torch", "triton", "transformers", "flash-attn", "lockstep-llm")
# A CPU has no memory budget of its own to measure, and tests start many engines.
CPU_KV_CACHE_BYTES = 1024**3


def resolve_device(options: EngineOptions, rank: int) -> torch.device:
    """The device of one rank.

    Raises:
        ConfigError: CUDA is asked for and absent, or there are fewer GPUs than ranks.
    """
    has_cuda = torch.cuda.is_available()
    if options.device == "cpu" or (options.device == "auto" and not has_cuda):
        return torch.device("cpu")
    if not has_cuda:
        raise ConfigError("device", options.device, "no CUDA device is available")
    if options.tensor_parallel_size > torch.cuda.device_count():
        raise ConfigError(
            "tensor_parallel_size",
            options.tensor_parallel_size,
            f"there are {torch.cuda.device_count()} CUDA devices",
        )
    return torch.device("cuda", rank)


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({torch.get_num_threads()} threads)"


def installed_versions(device: torch.device) -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found: dict[str, str] = {}
    for name in _REPORTED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
    return found
