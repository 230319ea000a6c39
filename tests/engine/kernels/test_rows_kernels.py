"""The kernels of few decode rows equal the separate layers that they replace."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from kernel_testing import KERNEL_DEVICE as DEVICE
from torch.nn import functional

from engine.attention.base import AttentionMetadata
from engine.attention.torch_backend import TorchAttention
from engine.kernels.rows_attention import rows_attention
from engine.kernels.rows_dot import DotTuning, rows_dot
from engine.kernels.rows_linear import LinearTuning, rows_linear
from engine.layers.mlp import silu_mul
from engine.layers.norm import rms_norm
from engine.layers.rope import apply_rope, cos_sin_table
from engine.layers.rope_config import RopeConfig

HALVES = [torch.bfloat16, torch.float16]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def reference_linear(x, weight, bias, gain, gated, residual):
    """The separate layers, rounding where they do."""
    if gain is not None:
        x = rms_norm(x, gain, 1e-5)
    y = functional.linear(x, weight, bias)
    if gated:
        y = silu_mul(y)
    return y if residual is None else y + residual


def linear_case(rows, in_features, out_features, gated, bias, norm, residual, dtype):
    torch.manual_seed(rows * in_features + out_features)

    def randn(*shape):
        return torch.randn(*shape, device=DEVICE)

    x = randn(rows, in_features).to(dtype)
    width = out_features * (2 if gated else 1)
    weight = (randn(width, in_features) / in_features**0.5).to(dtype)
    more = (
        randn(width).to(dtype) if bias else None,
        (torch.rand(in_features, device=DEVICE) + 0.5).to(dtype) if norm else None,
        gated,
        randn(rows, out_features).to(dtype) if residual else None,
    )
    return x, weight, *more


PRODUCTS = {
    "linear": partial(rows_linear, tuning=LinearTuning(block_n=4, block_k=256, num_warps=4)),
    "dot": partial(rows_dot, tuning=DotTuning(block_n=16, block_k=64, num_warps=1, num_stages=2)),
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("in_features", "out_features"), [(48, 5), (1000, 17)])
@pytest.mark.parametrize(
    ("gated", "bias", "norm", "residual"),
    [
        (False, False, False, False),
        (False, True, True, False),
        (False, True, False, True),
        (True, False, True, False),
        (True, True, True, False),
    ],
)
def test_a_product_is_the_layers_around_it(
    product, rows, in_features, out_features, gated, bias, norm, residual
):
    case = linear_case(rows, in_features, out_features, gated, bias, norm, residual, torch.float32)
    x, weight, bias, gain, gated, residual = case
    more = {} if gain is None else {"gain": gain, "eps": 1e-5}
    if product == "dot" and norm:
        pytest.skip("its norm is a kernel of its own")
    out = PRODUCTS[product](x, weight, bias, gated=gated, residual=residual, **more)
    torch.testing.assert_close(out, reference_linear(*case), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(576, 1536), (1024, 4096), (12288, 4096)]
)
def test_products_in_half_precision(rows, in_features, out_features, dtype):
    for gated, norm, residual in (
        (False, True, False),
        (False, False, True),
        (True, True, False),
        (True, False, False),
    ):
        case = linear_case(rows, in_features, out_features, gated, True, norm, residual, dtype)
        x, weight, bias, gain, gated, residual = case
        truth = reference_linear(*(t.double() if isinstance(t, torch.Tensor) else t for t in case))
        for product in (rows_linear, rows_dot):
            if (gain is not None) if product is rows_dot else rows > 2:
                continue
            more = {} if gain is None else {"gain": gain, "eps": 1e-5}
            out = product(x, weight, bias, gated=gated, residual=residual, **more)
            error = ((out.double() - truth).norm() / truth.norm()).item()
            assert error < 2 * torch.finfo(dtype).eps, product


def attention_case(heads, kv_heads, head_dim, block_size, contexts, norm, dtype):
    """Contexts count the new token; 0 is a padded row. Unwritten slots are NaN."""
    torch.manual_seed(sum(contexts) + head_dim)
    num_blocks = sum(-(-c // block_size) for c in contexts) + 1
    width = max(-(-c // block_size) for c in contexts) + 1
    order = iter(torch.randperm(num_blocks).tolist())
    shape = (2, 2, num_blocks, block_size, kv_heads, head_dim)
    cache = torch.full(shape, float("nan"), device=DEVICE, dtype=dtype)[:, 1]
    tables = torch.zeros(len(contexts), width, dtype=torch.int32)
    slots = torch.full((len(contexts),), -1)
    for row, context in enumerate(contexts):
        blocks = [next(order) for _ in range(-(-context // block_size))]
        tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        places = [blocks[p // block_size] * block_size + p % block_size for p in range(context)]
        if context:
            slots[row] = places[-1]
            old = torch.randn(2, context - 1, kv_heads, head_dim, device=DEVICE).to(dtype)
            for part in (0, 1):
                cache[part].flatten(0, 1)[places[:-1]] = old[part]
    qkv = torch.randn(len(contexts), (heads + 2 * kv_heads) * head_dim, device=DEVICE).to(dtype)
    gains = (
        (torch.rand(2, head_dim, device=DEVICE) + 0.5).to(dtype).unbind() if norm else [None] * 2
    )
    positions = torch.tensor([max(c - 1, 0) for c in contexts], device=DEVICE)
    lens = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    table = cos_sin_table(RopeConfig(), head_dim, max(contexts) + 1, torch.device(DEVICE))
    return qkv, *gains, table, positions, cache, slots.to(DEVICE), tables.to(DEVICE), lens


def reference_attention(qkv, q_norm, k_norm, table, positions, cache, slots, tables, lens):
    """Output and cache by the separate layers, in float32."""
    kv_heads, head_dim = cache.shape[3:]
    heads = qkv.view(len(qkv), -1, head_dim)
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if q_norm is not None:
        q, k = rms_norm(q.float(), q_norm, 1e-5), rms_norm(k.float(), k_norm, 1e-5)
    rows = table[positions]
    q, k = (apply_rope(t.float(), rows).to(qkv.dtype) for t in (q, k))
    cache = cache.float()
    meta = AttentionMetadata(slots, len(qkv), tables, lens, int(lens.max()))
    out = TorchAttention().forward(q.float(), k.float(), v.float(), cache, meta, head_dim**-0.5)
    return out, cache


def check_attention(case, splits, limit):
    qkv, q_norm, k_norm, table, positions, cache, slots, tables, lens = case
    expected, expected_cache = reference_attention(*case)
    arrived = torch.zeros(len(qkv) * cache.shape[3], dtype=torch.int32, device=DEVICE)
    before = cache.clone()
    for _ in range(2):  # the second launch finds the counters as the first did
        cache.copy_(before)
        out = rows_attention(
            qkv, q_norm, k_norm, 1e-5, table, positions, cache, slots, tables, lens,
            cache.shape[4] ** -0.5, arrived, splits,
        )  # fmt: skip
        assert not arrived.any()
    valid = lens > 0
    error = (out[valid].float() - expected[valid]).norm() / expected[valid].norm()
    assert error.item() < limit
    assert torch.isfinite(out).all()
    torch.testing.assert_close(
        cache.float(), expected_cache, rtol=limit, atol=limit, equal_nan=True
    )
    return out


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("shape", [(4, 2, 16, 16), (3, 1, 24, 5), (6, 2, 64, 48)])
def test_attention_is_the_layers_that_it_joins(shape, norm, splits):
    case = attention_case(*shape, [1, 33, 0, 100, 34, 300], norm, torch.float32)
    check_attention(case, splits, 1e-5)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "shape", [(16, 8, 128), (32, 8, 128), (9, 3, 64), (32, 8, 80), (8, 4, 256)]
)
def test_attention_in_half_precision(shape, dtype):
    for block_size, contexts in ((16, [1, 290, 0, 1500, 65]), (256, [3000])):
        case = attention_case(*shape, block_size, contexts, True, dtype)
        check_attention(case, None, 4 * torch.finfo(dtype).eps)
