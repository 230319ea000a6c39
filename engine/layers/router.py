"""Which experts each token goes to, and with what weight."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def float32_scores(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T, rounded to float32 only."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return functional.linear(x.float(), weight.float())


def route(x: Tensor, weight: Tensor, top_k: int, renormalised: bool) -> tuple[Tensor, Tensor]:
    """(weights float32 [T, top_k], experts int32 [T, top_k]) for x [T, H]; the reference.

    Scores are computed in float32 whatever the model's dtype: a rounded score flips choices. Of
    equal probabilities the lower expert is chosen, so that ranks and batches agree.
    """
    probabilities = torch.softmax(float32_scores(x, weight), dim=-1)
    ordered = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    weights, experts = ordered.values[:, :top_k], ordered.indices[:, :top_k]
    if renormalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.contiguous(), experts.to(torch.int32)
