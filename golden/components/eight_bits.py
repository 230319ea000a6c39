"""The 8-bit products of a GPU against the same numbers multiplied in float64.

Both sides meet the same quantised activations, so no rounding can fall the other way. What is left
is the matrix units' sum: Hopper's keeps 14 bits of it, K / 32 times one after the other, and the
output is rounded to 16 bits. Errors of one sign would reach K / 32 * 2^-14 (2^-8 for K = 2,048); as
they have both signs, MOST_ERROR is that bound for any size here with room, and a scale that is a
tenth too large is six times beyond it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.layers.fp8 import FP8, Fp8Matrix, quantise_rows
from golden.results import CaseResult, judged

GROUP = "8-bit products"
MOST_ERROR = 2**-6
ROWS = (1, 16, 17, 40, 64, 96, 200, 300)
# The library wants numbers of blocks that are multiples of 4: 1,152 and 640 are not.
SIZES = ((256, 512), (384, 1152), (896, 640), (1024, 2048))
BLOCKS = {"channel": None, "blocks of 128": (128, 128), "blocks of 32": (32, 32)}


def eight_bit_results(device: torch.device) -> Iterator[CaseResult]:
    """Every form of scales, and a planted one; `device` must be a GPU."""
    for name, block in BLOCKS.items():
        worst = max(_worst(device, *size, block) for size in SIZES)
        problems = [] if worst <= MOST_ERROR else [f"a row or column is off by {worst:.3g}"]
        yield judged(GROUP, f"scales per {name}", problems, worst=worst)
    caught = _worst(device, *SIZES[-1], None, spoiled=1.1)
    missed = [] if caught > 4 * MOST_ERROR else [f"off by {caught:.3g} only"]
    yield judged(GROUP, "a scale a tenth too large is caught", missed, caught=caught)


def _worst(
    device: torch.device, n: int, k: int, block: tuple[int, int] | None, spoiled: float = 1.0
) -> float:
    """The largest relative error of a row or column of outputs, over all numbers of rows."""
    generator = torch.Generator().manual_seed(n + k)
    weight = (torch.randn(n, k, generator=generator) * 60).clamp(-448, 448).to(FP8).to(device)
    shape = (n,) if block is None else (n // block[0], k // block[1])
    scale = (torch.rand(shape, generator=generator) * 0.01 + 1e-3).to(device)
    used = scale.clone()
    used.view(-1)[5] *= spoiled
    plain = Fp8Matrix(weight, scale, block, fused=False).plain().double()
    matrix = Fp8Matrix(weight, used, block, fused=True)
    worst = 0.0
    for rows in ROWS:
        x = torch.randn(rows, k, generator=generator).to(device, torch.bfloat16)
        met = matrix.quantised(x)
        truth = met.dequantised().double() @ plain.T
        found = matrix.product(met).double()
        worst = max(worst, _relative(found, truth, 0), _relative(found, truth, 1))
        _check_rows(met.dequantised(), x, block)
    return worst


def _relative(found: Tensor, truth: Tensor, dim: int) -> float:
    """Over columns only where they are long enough to have a norm of their own."""
    if found.shape[dim] < 16:
        return 0.0
    return float(((found - truth).norm(dim=dim) / truth.norm(dim=dim)).max())


def _check_rows(met: Tensor, x: Tensor, block: tuple[int, int] | None) -> None:
    """What the fused kernel quantised is within a step of the reference."""
    expected = quantise_rows(x, None if block is None else block[1]).dequantised()
    assert float((met - expected).norm() / expected.norm()) < 2**-8, "quantised otherwise"
