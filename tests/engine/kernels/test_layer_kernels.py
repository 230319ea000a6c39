"""The fused kernels equal their torch references (in the interpreter, or on a GPU)."""

from types import SimpleNamespace

import pytest
import torch
from kernel_testing import KERNEL_DEVICE as DEVICE

from engine.attention.torch_backend import store_kv
from engine.kernels.activation import fused_silu_mul
from engine.kernels.norm import fused_add_rms_norm, fused_rms_norm
from engine.kernels.qkv_rope import qk_norm_rope_store
from engine.layers.mlp import silu_mul
from engine.layers.norm import add_rms_norm, rms_norm
from engine.layers.rope import apply_rope, cos_sin_table
from engine.layers.rope_config import RopeConfig


@pytest.mark.parametrize("size", [32, 48, 1000])
def test_norm_kernels(size):
    torch.manual_seed(size)
    x, residual = torch.randn(2, 3, size, device=DEVICE)
    weight = torch.rand(size, device=DEVICE) + 0.5
    before = x.clone(), residual.clone()
    torch.testing.assert_close(fused_rms_norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5))
    out, total = fused_add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_total = add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(out, expected)
    assert torch.equal(total, expected_total)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("size", [24, 1500])
def test_silu_mul_kernel(size):
    x = torch.randn(3, 2 * size, device=DEVICE) * 4
    torch.testing.assert_close(fused_silu_mul(x), silu_mul(x))


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 2, 16), (3, 1, 24), (9, 3, 64), (8, 8, 80)]
)
def test_qkv_kernel_normalises_rotates_and_stores(heads, kv_heads, head_dim, norm):
    """Rows of slot -1 are rotated but not stored; other slots of the cache are untouched."""
    torch.manual_seed(0)
    num_tokens, block_size = 5, 4
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * head_dim, device=DEVICE)
    weights = (torch.rand(2, head_dim, device=DEVICE) + 0.5).unbind() if norm else (None, None)
    table = cos_sin_table(RopeConfig(), head_dim, 40, torch.device(DEVICE))
    positions = torch.tensor([0, 7, 39, 3, 1], device=DEVICE)
    slots = torch.tensor([9, -1, 2, 23, 0], device=DEVICE)
    whole = torch.randn(2, 3, 6, block_size, kv_heads, head_dim, device=DEVICE)
    ours, expected = whole.clone(), whole.clone()
    meta = SimpleNamespace(slot_mapping=slots)

    q = qk_norm_rope_store(qkv, *weights, 1e-5, table, positions, ours[:, 1], meta.slot_mapping)

    split = (heads, kv_heads, kv_heads)
    q_ref, k_ref, v_ref = qkv.view(num_tokens, -1, head_dim).split(split, dim=1)
    if norm:
        q_ref, k_ref = rms_norm(q_ref, weights[0], 1e-5), rms_norm(k_ref, weights[1], 1e-5)
    rows = table[positions]
    store_kv(apply_rope(k_ref, rows), v_ref, expected[:, 1], slots)
    torch.testing.assert_close(q, apply_rope(q_ref, rows))
    torch.testing.assert_close(ours, expected)
    assert torch.equal(ours[:, 0], whole[:, 0])
    assert torch.equal(ours[:, 2], whole[:, 2])
