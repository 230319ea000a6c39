"""Every kernel compiles for a real GPU in half precision, which the interpreter cannot show."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_kernels.py")
KERNELS = {
    "_decode_kernel",
    "_combine_kernel",
    "_prefill_kernel",
    "_store_kernel",
    "_norm_kernel",
    "_silu_mul_kernel",
    "_qkv_kernel",
    "_race_kernel",
    "_final_kernel",
    "_filter_kernel",
    "_one_shot_kernel",
    "_decode_rows_kernel",
    "_top_k_kernel",
    "_order_kernel",
    "_grouped_kernel",
    "_quantise_kernel",
    "_fp8_product_kernel",
    "_sum_kernel",
    "_prompt_rows_kernel",
    "_worklist_kernel",
    "_ragged_kernel",
    "_rows_linear_kernel",
    "_rows_attention_kernel",
    "_rows_dot_kernel",
}


def test_kernels_compile_for_a_gpu(tmp_path):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = str(SCRIPT.parents[3])
    run = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert {line.split()[0] for line in run.stdout.splitlines()} == KERNELS
