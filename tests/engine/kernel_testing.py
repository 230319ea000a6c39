"""Where Triton kernels are tested: on the GPU if there is one, else in Triton's interpreter.

The interpreter's bf16 products are wrong, so other dtypes than float32 are for GPUs.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import triton.language as tl

KERNEL_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if KERNEL_DEVICE == "cpu":
    kind = type(tl.cdiv).__name__
    assert kind == "InterpretedFunction", "triton was imported before TRITON_INTERPRET was set"
