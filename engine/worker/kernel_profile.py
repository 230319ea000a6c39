"""What a rank's device did during a stretch of steps, from torch's profiler.

On CUDA every kernel and copy counts, those inside graphs too. On a CPU only gloo's collectives
have an end of their own to measure; operators count by the time they ran themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

_COLLECTIVES = ("nccl", "gloo:", "_one_shot_kernel")
_LONGEST_NAME = 120


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All runs of one kernel."""

    name: str
    total_ms: float
    count: int

    @property
    def is_collective(self) -> bool:
        """Whether it communicates with other ranks; its time holds the wait for them."""
        return self.name.startswith(_COLLECTIVES)


@dataclass(frozen=True, slots=True)
class KernelProfile:
    """Kernels by falling time; `span_ms` is from the first one's start to the last one's end."""

    span_ms: float
    kernels: tuple[KernelTime, ...]

    @property
    def busy_ms(self) -> float:
        """Kernel time in all; kernels of one stream do not overlap."""
        return sum(kernel.total_ms for kernel in self.kernels)

    @property
    def collective_ms(self) -> float:
        """Time in collectives."""
        return sum(kernel.total_ms for kernel in self.kernels if kernel.is_collective)


class KernelProfiler:
    """Records between `start` and `stop`; both wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profiler: Any = None

    def start(self) -> None:
        """Begins a recording."""
        self._synchronize()
        activity = torch.profiler.ProfilerActivity
        wanted = activity.CUDA if self._device.type == "cuda" else activity.CPU
        self._profiler = torch.profiler.profile(activities=[wanted])
        self._profiler.start()

    def stop(self) -> KernelProfile:
        """Ends the recording and sums it up."""
        self._synchronize()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        return sum_up(profiler.events(), on_cuda=self._device.type == "cuda")

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def sum_up(events: Iterable[Any], on_cuda: bool) -> KernelProfile:
    """The profile of torch's function events."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    starts, ends = [], []
    for event in events:
        if (event.device_type.name == "CUDA") != on_cuda:
            continue
        name = event.name[:_LONGEST_NAME]
        # A range that the library marks on the device lies over the kernels that are counted.
        if on_cuda and (getattr(event, "is_user_annotation", False) or name.startswith("nccl:")):
            continue
        whole = on_cuda or name.startswith(_COLLECTIVES)
        elapsed = event.time_range.elapsed_us() if whole else event.self_cpu_time_total
        totals[name][0] += elapsed / 1e3
        totals[name][1] += 1
        starts.append(event.time_range.start)
        ends.append(event.time_range.end)
    span_ms = (max(ends) - min(starts)) / 1e3 if starts else 0.0
    kernels = [KernelTime(name, ms, int(count)) for name, (ms, count) in totals.items()]
    return KernelProfile(span_ms, tuple(sorted(kernels, key=lambda item: -item.total_ms)))
