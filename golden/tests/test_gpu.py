"""On a GPU: every backend's components and the quick run; elsewhere listed as skipped."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from golden.components.attention import attention_results
from golden.components.layers import Place
from golden.gpu import DTYPES, GpuPlan, gpu_results
from golden.tests.test_components import require_all

pytestmark = pytest.mark.gpu
BLOCK_SIZES = {"triton": (16, 256), "flash_attn": (256,)}


def need_gpu(backend: str) -> None:
    """Skips with the reason why a backend cannot run here."""
    if not torch.cuda.is_available():
        pytest.skip(f"{backend}: no CUDA device")
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend}: the package is not installed")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BLOCK_SIZES)
def test_attention_follows_hf(backend: str, dtype: torch.dtype) -> None:
    need_gpu(backend)
    place = Place(torch.device("cuda", 0), dtype, fused=True)
    require_all(attention_results(backend, place, BLOCK_SIZES[backend]))


@pytest.mark.timeout(600)
def test_quick_run_passes() -> None:
    need_gpu("triton")
    require_all(gpu_results(GpuPlan(quick=True)))
