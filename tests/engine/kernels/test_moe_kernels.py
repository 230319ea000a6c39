"""The kernels of mixtures of experts equal their references (in the interpreter, or on a GPU)."""

import pytest
import torch
from kernel_testing import KERNEL_DEVICE as DEVICE
from model_testing import new_caches, step

from engine.attention.torch_backend import TorchAttention
from engine.distributed.group import TpGroup
from engine.kernels.moe_products import grouped_product
from engine.kernels.moe_route import fused_top_k, order_by_expert, sum_shares
from engine.layers.moe import experts_reference
from engine.layers.router import route
from engine.models.build import build_model
from engine.models.config import resolve_model_config
from engine.models.loader import init_dummy_weights
from engine.models.presets import PRESETS


@pytest.mark.parametrize("renormalised", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (60, 4), (128, 8), (3, 3)])
def test_top_k_chooses_as_the_reference_also_among_equals(num_experts, top_k, renormalised):
    torch.manual_seed(num_experts)
    x = torch.randn(13, 32, device=DEVICE)
    weight = torch.randn(num_experts, 32, device=DEVICE).round(decimals=1)
    weight[1::2] = weight[: num_experts - 1 : 2][: weight[1::2].shape[0]]
    weights, experts = fused_top_k(x @ weight.T, top_k, renormalised)
    expected, expected_experts = route(x, weight, top_k, renormalised)
    assert torch.equal(experts, expected_experts)
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("block_m", [16, 32])
@pytest.mark.parametrize("num_tokens", [1, 5, 70, 700])
@pytest.mark.parametrize(("first", "held"), [(0, 8), (3, 4), (8, 8)])
def test_pairs_are_sorted_by_expert_and_cut_into_tiles(num_tokens, block_m, first, held):
    """Ranks that hold a part of the experts see their pairs only; some experts get none."""
    torch.manual_seed(num_tokens)
    # Expert 5 gets nothing, and nobody of 8..15 does.
    experts = torch.tensor([0, 1, 2, 3, 4, 6, 7], device=DEVICE)[
        torch.randint(0, 7, (num_tokens, 3), device=DEVICE)
    ].to(torch.int32)
    order = order_by_expert(experts, first, held, block_m)
    wanted = torch.argsort(experts.flatten(), stable=True)
    here = experts.flatten()[wanted]
    wanted = wanted[(here >= first) & (here < first + held)]
    assert order.pairs[: wanted.numel()].tolist() == wanted.tolist()
    covered = []
    ends = order.expert_end.tolist()
    for expert, start in zip(order.tile_expert.tolist(), order.tile_first.tolist(), strict=True):
        if expert < 0:
            continue
        members = order.pairs[start : min(start + block_m, ends[expert])].tolist()
        assert members
        assert {int(experts.flatten()[p]) for p in members} == {first + expert}
        covered += members
    assert covered == wanted.tolist()


@pytest.mark.parametrize("num_tokens", [1, 7, 40])
@pytest.mark.parametrize(("first", "held"), [(0, 6), (2, 3)])
@pytest.mark.parametrize(("hidden", "width"), [(48, 32), (64, 40), (32, 96)])
def test_grouped_products_equal_the_loop_over_experts(num_tokens, first, held, hidden, width):
    torch.manual_seed(num_tokens)
    x = torch.randn(num_tokens, hidden, device=DEVICE)
    router = torch.randn(6, hidden, device=DEVICE)
    gate_up = torch.randn(held, 2 * width, hidden, device=DEVICE) * 0.2
    down = torch.randn(held, hidden, width, device=DEVICE) * 0.2
    weights, experts = route(x, router, 2, True)
    order = order_by_expert(experts, first, held, 16)
    rows = grouped_product(x, gate_up, order, 2, None, x.dtype)
    shares = grouped_product(rows, down, order, 2, weights, x.dtype)
    out = sum_shares(shares, experts, first, held)
    expected = experts_reference(x, weights, experts, gate_up, down, first)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_no_tokens_are_no_launch():
    x = torch.zeros(0, 32, device=DEVICE)
    weights, experts = fused_top_k(torch.zeros(0, 6, device=DEVICE), 2, True)
    order = order_by_expert(experts, 0, 6, 16)
    rows = grouped_product(x, torch.zeros(6, 64, 32, device=DEVICE), order, 2, None, x.dtype)
    assert rows.shape == (0, 32)
    assert sum_shares(rows, experts, 0, 6).shape == (0, 32)
    assert weights.shape == (0, 2)


@pytest.mark.parametrize("preset", ["tiny-qwen3-moe", "tiny-mixtral"])
def test_a_model_of_fused_layers_computes_what_the_plain_one_does(preset):
    config = resolve_model_config({**PRESETS[preset], "num_hidden_layers": 1}, ())
    hidden = []
    for fused in (True, False):
        model = build_model(
            config, TpGroup(), TorchAttention(), torch.float32, DEVICE, fused=fused, max_position=64
        )
        init_dummy_weights(model, 3, std=0.1)
        caches = new_caches(model, device=DEVICE)
        hidden.append(step(model, caches, [("a", [5, 9, 200, 7, 5], 0)], {"a": [3, 1]}, DEVICE))
    torch.testing.assert_close(hidden[0], hidden[1], rtol=1e-4, atol=1e-4)
