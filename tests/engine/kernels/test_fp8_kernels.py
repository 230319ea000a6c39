"""8-bit kernels equal their references (in the interpreter, or on a GPU)."""

import pytest
import torch
from kernel_testing import KERNEL_DEVICE as DEVICE

from engine.kernels import fp8_product
from engine.kernels.fp8_product import triton_product
from engine.kernels.fp8_quantise import (
    fused_norm_quantise,
    fused_quantise_rows,
    fused_silu_mul_quantise,
)
from engine.kernels.moe_products import grouped_product
from engine.kernels.moe_route import order_by_expert, sum_shares
from engine.layers.fp8 import Fp8Matrix, QuantisedRows, quantise_rows
from engine.layers.mlp import silu_mul
from engine.layers.moe import experts_reference
from engine.layers.norm import add_rms_norm, rms_norm
from engine.layers.router import route


def same_rows(found, expected):
    """Values may differ by one step where a quotient lies on the border of two.

    The interpreter halves some numbers that round up to a power of two; a GPU does not.
    """
    torch.testing.assert_close(found.scale, expected.scale)
    if DEVICE == "cpu":
        halved = found.values.float() * 2 == expected.values.float()
        halved &= expected.values.float() != 0
        assert halved.float().mean() < 0.03
        found.values.copy_(torch.where(halved, expected.values.float(), found.values.float()))
    a, b = found.dequantised(), expected.dequantised()
    torch.testing.assert_close(a, b, rtol=2**-3, atol=float(expected.scale.max()) * 2**-8)
    assert (found.values.view(torch.uint8) != expected.values.view(torch.uint8)).sum() <= 1 + (
        a.numel() // 500
    )


@pytest.mark.parametrize("group", [None, 32])
def test_rows_are_quantised_as_by_the_reference(group):
    torch.manual_seed(1)
    x = torch.randn(5, 96, device=DEVICE) * torch.logspace(-3, 3, 5, device=DEVICE)[:, None]
    x[3] = 0
    residual, weight = torch.randn(5, 96, device=DEVICE), torch.rand(96, device=DEVICE) + 0.5
    same_rows(QuantisedRows(*fused_quantise_rows(x, group), x.dtype), quantise_rows(x, group))
    values, scale, total = fused_norm_quantise(x, residual, weight, 1e-5, group)
    normed, expected_total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    same_rows(QuantisedRows(values, scale, x.dtype), quantise_rows(normed, group))
    halves = x.clamp(-20, 20).repeat(1, 2)[:, :128]
    values, scale, _ = fused_norm_quantise(x, None, weight, 1e-5, group)
    same_rows(
        QuantisedRows(values, scale, x.dtype), quantise_rows(rms_norm(x, weight, 1e-5), group)
    )
    same_rows(
        QuantisedRows(*fused_silu_mul_quantise(halves, group), x.dtype),
        quantise_rows(silu_mul(halves), group),
    )


def matrix(shape, block):
    """A quantised random matrix with scales of several magnitudes."""
    weight = torch.randn(shape, device=DEVICE).clamp(-3, 3) * 100
    if block is None:
        scale = torch.rand(shape[:-1], device=DEVICE) * 0.01 + 1e-4
    else:
        rows, columns = shape[-2] // block[0], shape[-1] // block[1]
        scale = torch.rand((*shape[:-2], rows, columns), device=DEVICE) * 0.01 + 1e-4
    return weight.to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("block", [None, (32, 32), (16, 64)])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 64, 128), (5, 96, 64), (40, 32, 192)])
def test_products_equal_those_of_the_dequantised_numbers(rows, n, k, block):
    torch.manual_seed(rows)
    weight, scale = matrix((n, k), block)
    x = quantise_rows(torch.randn(rows, k, device=DEVICE), None if block is None else block[1])
    out = triton_product(x.values, x.scale, weight, scale, block, torch.float32)
    expected = Fp8Matrix(weight, scale, block, fused=False).product(x)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("block", [None, (32, 32)])
def test_grouped_products_equal_those_of_the_dequantised_numbers(block):
    torch.manual_seed(2)
    hidden, width, held, top_k = 64, 32, 4, 2
    x = torch.randn(9, hidden, device=DEVICE)
    weights, experts = route(x, torch.randn(held, hidden, device=DEVICE), top_k, True)
    gate_up, gate_up_scale = matrix((held, 2 * width, hidden), block)
    down, down_scale = matrix((held, hidden, width), block)
    group = None if block is None else block[1]
    order = order_by_expert(experts, 0, held, 16)
    a = quantise_rows(x, group)
    rows = grouped_product(
        a.values, gate_up, order, top_k, None, x.dtype, a.scale, gate_up_scale, block
    )
    a = quantise_rows(rows, group)
    shares = grouped_product(
        a.values, down, order, top_k, weights, x.dtype, a.scale, down_scale, block
    )
    out = sum_shares(shares, experts, 0, held)
    matrices = [
        [Fp8Matrix(w, s, block, False) for w, s in zip(*pair, strict=True)]
        for pair in ((gate_up, gate_up_scale), (down, down_scale))
    ]
    expected = experts_reference(x, weights, experts, *matrices, 0)
    # A rounding that falls the other way between the products moves one number by one step.
    difference = (out - expected).abs()
    assert float(difference.max()) <= 2**-4 * float(expected.abs().max())
    assert float(difference.median()) <= 1e-5 * float(expected.abs().max())


def test_rows_beyond_whole_steps_are_not_left_to_the_library(monkeypatch):
    """The library was seen to take multiples of 16 rows, and of 4 blocks a row; others are cut."""
    torch.manual_seed(4)
    seen = []

    def library(a, a_scale, w, w_scale, out):
        seen.append(a.shape[0])
        x = QuantisedRows(a, a_scale, out.dtype)
        out.copy_(Fp8Matrix(w, w_scale, (128, 128), fused=False).product(x))

    monkeypatch.setattr(fp8_product, "has_library_blocks", lambda device: True)
    monkeypatch.setattr(fp8_product, "library_block_product", library)
    cases = ((16, 512, None), (32, 512, 32), (37, 512, 32), (32, 384, None), (32, 640, None))
    for rows, columns, whole in cases:
        weight, scale = matrix((128, columns), (128, 128))
        matrix_of = Fp8Matrix(weight, scale, (128, 128), fused=False)
        x = quantise_rows(torch.randn(rows, columns, device=DEVICE), 128)
        args = (x.values, x.scale, weight, scale, (128, 128), torch.bfloat16)
        out = fp8_product.fp8_product(*args)
        expected = matrix_of.product(QuantisedRows(x.values, x.scale, torch.bfloat16))
        torch.testing.assert_close(out.float(), expected.float(), rtol=2e-2, atol=2e-2)
        assert (seen.pop() if seen else None) == whole
