"""Routing and experts: ties, experts without tokens, and the split over ranks."""

import pytest
import torch

from engine.core.errors import ConfigError
from engine.distributed.group import TpGroup
from engine.layers.mlp import silu_mul
from engine.layers.moe import SparseMoe, experts_reference
from engine.layers.moe_config import MIXTRAL, QWEN2_MOE, QWEN_MOE, MoeConfig, check_expert_split
from engine.layers.router import route


def moe(family=QWEN_MOE, **changes):
    sizes = dict(
        family=family,
        num_experts=6,
        num_experts_per_tok=2,
        intermediate_size=8,
        shared_intermediate_size=12 if family is QWEN2_MOE else 0,
        renormalised=True,
        sparse_layers=frozenset((0,)),
    )
    return MoeConfig(**{**sizes, **changes})


def block(config, rank=0, size=1, expert_parallel=False, seed=0, full=None):
    made = SparseMoe(
        16, config, TpGroup(rank, size), torch.float32, torch.device("cpu"), False, expert_parallel
    )
    made.group = TpGroup()  # ranks of one process: their shares are added by the test
    if made.shared is not None:
        made.shared.down.group = TpGroup()
    generator = torch.Generator().manual_seed(seed)
    for item in made.weight_slices("mlp."):
        weight = torch.randn(item.full_shape, generator=generator)
        item.target.copy_(weight.narrow(item.dim, item.start, item.target.shape[item.dim]))
    return made


def test_of_equal_scores_the_lower_expert_is_taken():
    weight = torch.randn(4, 16).repeat_interleave(2, dim=0)
    x = torch.randn(50, 16)
    _, experts = route(x, weight, 3, False)
    assert torch.equal(experts[:, 1], experts[:, 0] + 1)
    assert not (experts[:, 0] % 2).any()
    assert not (experts[:, 2] % 2).any()
    _, all_equal = route(x, torch.ones(8, 16), 3, False)
    assert torch.equal(all_equal, torch.tensor([[0, 1, 2]], dtype=torch.int32).expand(50, 3))


@pytest.mark.parametrize("renormalised", [True, False])
def test_weights_are_the_probabilities_or_sum_to_one(renormalised):
    x, weight = torch.randn(9, 16), torch.randn(6, 16)
    weights, experts = route(x, weight, 2, renormalised)
    probabilities = torch.softmax(x @ weight.T, dim=-1).gather(1, experts.long())
    if renormalised:
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, probabilities)


def test_scores_of_16_bit_tokens_are_not_rounded():
    """A score in bfloat16 has 8 bits: of 64 experts some would tie that do not."""
    x, weight = torch.randn(40, 256).bfloat16(), torch.randn(64, 256).bfloat16()
    weights, experts = route(x, weight, 8, True)
    expected, expected_experts = route(x.float(), weight.float(), 8, True)
    assert torch.equal(experts, expected_experts)
    assert torch.equal(weights, expected)


def test_an_expert_without_tokens_adds_nothing():
    x = torch.randn(5, 16)
    gate_up, down = torch.randn(6, 16, 16), torch.randn(6, 16, 8)
    chosen = torch.tensor([[0, 3]], dtype=torch.int32).expand(5, 2)
    weights = torch.rand(5, 2)
    gate_up[[1, 2, 4, 5]] = float("nan")
    out = experts_reference(x, weights, chosen, gate_up, down, 0)
    parts = [silu_mul(x @ gate_up[e].T) @ down[e].T for e in (0, 3)]
    expected = parts[0] * weights[:, :1] + parts[1] * weights[:, 1:]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert not experts_reference(x, weights, chosen, gate_up[4:], down[4:], 4).any()
    assert experts_reference(x[:0], weights[:0], chosen[:0], gate_up, down, 0).shape == (0, 16)


@pytest.mark.parametrize("family", [QWEN_MOE, QWEN2_MOE, MIXTRAL], ids=lambda f: f.block)
@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_the_ranks_shares_add_up_to_the_whole(size, expert_parallel, family):
    config = moe(family, intermediate_size=12)
    x = torch.randn(11, 16)
    whole = block(config)(x)
    shares = [block(config, rank, size, expert_parallel)(x) for rank in range(size)]
    torch.testing.assert_close(sum(shares), whole, rtol=1e-5, atol=1e-5 * float(whole.abs().max()))


def test_every_rank_names_every_expert():
    """Each rank accounts for the whole checkpoint, also for what others hold."""
    config = moe()
    names = {item.name for item in block(config).weight_slices("mlp.")}
    for rank in range(3):
        shard = block(config, rank, 3, expert_parallel=True)
        assert {item.name for item in shard.weight_slices("mlp.")} == names
        covered = sum(item.target.numel() for item in shard.weight_slices("mlp."))
        assert covered == sum(p.numel() for p in shard.parameters())


def test_a_split_that_does_not_divide_is_refused():
    check_expert_split(moe(), 2, False)
    check_expert_split(moe(), 6, True)
    with pytest.raises(ConfigError, match="intermediate size, 8"):
        check_expert_split(moe(), 3, False)
    with pytest.raises(ConfigError, match="6 experts"):
        check_expert_split(moe(), 4, True)
    with pytest.raises(ConfigError, match="shared expert's size, 12"):
        check_expert_split(moe(QWEN2_MOE), 8, False)
    with pytest.raises(ConfigError, match="no experts"):
        check_expert_split(None, 1, True)
    check_expert_split(None, 2, False)
