"""What a kernel profile counts of the profiler's events on a CUDA device."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from engine.worker.kernel_profile import sum_up
from engine.worker.probe import read_profile


def event(name, start_us, end_us, device="CUDA", annotation=False):
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=device),
        is_user_annotation=annotation,
        self_cpu_time_total=end_us - start_us,
        time_range=SimpleNamespace(
            start=start_us, end=end_us, elapsed_us=lambda: end_us - start_us
        ),
    )


EVENTS = [
    event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(args)", 1000, 1400),
    event("nccl:all_reduce", 900, 1500, annotation=True),
    event("gemm", 1500, 3500),
    event("gemm", 4000, 5000),
    event("cudaLaunchKernel", 0, 9000, device="CPU"),
]


def test_kernels_count_once_and_host_calls_do_not():
    profile = sum_up(EVENTS, on_cuda=True)
    assert [(k.name[:4], k.total_ms, k.count) for k in profile.kernels] == [
        ("gemm", 3.0, 2),
        ("nccl", 0.4, 1),
    ]
    assert profile.span_ms == 4.0
    assert profile.busy_ms == pytest.approx(3.4)
    assert profile.collective_ms == pytest.approx(0.4)


def test_a_profile_survives_the_way_to_the_engine():
    profile = sum_up(EVENTS, on_cuda=True)
    assert read_profile(json.dumps(asdict(profile))) == profile


def test_an_empty_recording_is_an_empty_profile():
    assert sum_up([], on_cuda=True).span_ms == 0.0
