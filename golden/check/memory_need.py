"""How much memory a check needs, said before anything is loaded, and where the truth is computed.

Truth, yardstick and engine are never there at the same time: each is freed before the next one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.core.errors import InputError
from engine.models.config import ModelConfig

# HF's activations of one text, buffers of the allocator, and Python itself.
_SPARE_BYTES = 1 << 30
_SHARE = 0.9
_TOKEN_ROWS = 256  # rows of logits that are compared at a time, for each side


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes of each stage, what stays beside all of them, and what the place has."""

    truth_bytes: int
    layer_bytes: int  # of the truth if it is computed layer by layer
    yardstick_bytes: int
    engine_bytes: int
    kept_bytes: int
    free_bytes: int
    place: str

    @property
    def by_layer(self) -> bool:
        """Whether the float32 model does not fit, so that its layers must come one by one."""
        return self.truth_bytes + self.kept_bytes + _SPARE_BYTES > _SHARE * self.free_bytes

    @property
    def peak_bytes(self) -> int:
        """The largest stage with what stays beside it."""
        first = self.layer_bytes if self.by_layer else self.truth_bytes
        stages = (first, min(self.yardstick_bytes, first), self.engine_bytes)
        return max(stages) + self.kept_bytes + _SPARE_BYTES

    def lines(self) -> list[str]:
        """For people, before the start."""
        how = "layer by layer" if self.by_layer else "whole"
        first = self.layer_bytes if self.by_layer else self.truth_bytes
        return [
            f"memory on {self.place}, one after the other: truth {_gib(first)} ({how}), yardstick "
            f"{_gib(min(self.yardstick_bytes, first))}, engine {_gib(self.engine_bytes)}; beside "
            f"them {_gib(self.kept_bytes)}; at most {_gib(self.peak_bytes)} of "
            f"{_gib(self.free_bytes)} that are free"
        ]

    def check(self) -> None:
        """Refuses what cannot fit.

        Raises:
            InputError: not even one layer at a time does.
        """
        if self.peak_bytes > self.free_bytes:
            raise InputError(
                f"the check needs {_gib(self.peak_bytes)} on {self.place}, of which "
                f"{_gib(self.free_bytes)} are free: give fewer or shorter prompts (--prompts), or "
                "compare with a reference that was made elsewhere (golden record, --reference)"
            )


def need_of(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    num_positions: int,
    kv_bytes: int,
    num_yardsticks: int,
    ranks: int = 1,
) -> MemoryNeed:
    """The stages of one check, from the files' headers."""
    total, largest_layer = stored_elements(folder)
    head = config.vocab_size * config.hidden_size
    kept = num_positions * config.hidden_size * (4 + dtype.itemsize * num_yardsticks)
    kept += head * (4 + dtype.itemsize) + 4 * _TOKEN_ROWS * config.vocab_size * 6
    return MemoryNeed(
        truth_bytes=4 * total,
        layer_bytes=4 * (2 * largest_layer + 2 * head),
        yardstick_bytes=dtype.itemsize * total,
        engine_bytes=dtype.itemsize * total // ranks + kv_bytes,
        kept_bytes=kept,
        free_bytes=free_bytes(device),
        place="the GPU" if device.type == "cuda" else "this machine",
    )


def stored_elements(folder: Path) -> tuple[int, int]:
    """(numbers in all tensors, numbers in the largest layer) by the headers of the files.

    Raises:
        InputError: there are no weights, or a file cannot be read.
    """
    layers: dict[str, int] = {}
    total = 0
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise InputError(f"{folder}: holds no *.safetensors file, so there is nothing to check")
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    size = 1
                    for length in file.get_slice(name).get_shape():
                        size *= length
                    total += size
                    parts = name.split(".layers.")
                    layer = parts[1].split(".")[0] if len(parts) == 2 else ""
                    layers[layer] = layers.get(layer, 0) + size
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: cannot be read, was the download cut?: {error}") from None
    inside = [size for layer, size in layers.items() if layer]
    return total, max(inside, default=total)


def free_bytes(device: torch.device) -> int:
    """What is free on the GPU, or what the machine and its control group leave."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except OSError:
        pass
    limit, used = _control_group()
    return free if limit is None else min(free, max(0, limit - used))


def _control_group() -> tuple[int | None, int]:
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text(encoding="ascii").strip()
        used = int((root / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None, 0
    return (None if limit == "max" else int(limit)), used


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
