"""Questions that a rank answers between steps, for measurements and tests."""

from __future__ import annotations

import json
from dataclasses import asdict

import torch

from engine.worker.kernel_profile import KernelProfile, KernelProfiler, KernelTime
from engine.worker.runner import ModelRunner

STATE_DIGEST = "state_digest"
PEAK_MEMORY_BYTES = "peak_memory_bytes"
START_PROFILE = "start_profile"
STOP_PROFILE = "stop_profile"


class RankProbe:
    """Answers in JSON, so that the answer is the same from this process and from another."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._profiler = KernelProfiler(runner.device)

    def answer(self, question: str) -> str:
        """The answer to one of the questions above."""
        if question == STATE_DIGEST:
            return json.dumps(self._runner.state_digest())
        if question == PEAK_MEMORY_BYTES:
            return json.dumps(peak_memory_bytes(self._runner.device))
        if question == START_PROFILE:
            self._profiler.start()
            return json.dumps(None)
        assert question == STOP_PROFILE, f"unknown question {question!r}"
        return json.dumps(asdict(self._profiler.stop()))


def peak_memory_bytes(device: torch.device) -> int | None:
    """Peak of the CUDA allocator since the KV cache was sized; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def read_profile(answer: str) -> KernelProfile:
    """The profile in an answer to `STOP_PROFILE`."""
    fields = json.loads(answer)
    kernels = tuple(KernelTime(**kernel) for kernel in fields["kernels"])
    return KernelProfile(fields["span_ms"], kernels)
