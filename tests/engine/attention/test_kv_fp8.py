"""A KV cache of 8-bit floats: every backend reads and writes the same numbers."""

import math

import pytest
import torch
from kernel_testing import KERNEL_DEVICE as DEVICE
from test_attention_backends import dense_attention, make_case
from test_ragged import as_ragged

from engine.attention.select import select_backend
from engine.attention.torch_backend import TorchAttention, store_kv, to_stored
from engine.attention.triton_backend import TritonAttention
from engine.core.errors import ConfigError
from engine.kernels.qkv_rope import qk_norm_rope_store
from engine.layers.rope import cos_sin_table
from engine.layers.rope_config import RopeConfig

FP8 = torch.float8_e4m3fn
STEPS = {
    "decode": ([5, 17, 1, 70], []),
    "padded decode": ([5, 0, 0], []),
    "mixed": ([33, 2], [(5, 37), (18, 18)]),
}


def on_the_grid(x):
    """The nearest 8-bit floats, in float32."""
    return to_stored(x, FP8).float()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", [(4, 2, 16), (9, 3, 64)], ids=str)
@pytest.mark.parametrize(
    ("backend", "block_size"), [(TorchAttention, 3), (TorchAttention, 16), (TritonAttention, 16)]
)
def test_attention_over_8_bit_keys_is_attention_over_their_numbers(
    backend, block_size, shape, step
):
    case = make_case(*shape, block_size, *STEPS[step])
    k, v = on_the_grid(case.k), on_the_grid(case.v)
    plain = on_the_grid(case.cache)
    scale = shape[2] ** -0.5
    expected = TorchAttention().forward(case.q, k, v, plain.clone(), case.meta, scale)
    cache = to_stored(case.cache, FP8)
    attention = backend()
    out = attention.forward(case.q, k, v, cache, attention.prepare(case.meta), scale)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    store_kv(k, v, plain, case.meta.slot_mapping)
    assert torch.equal(cache.float().nan_to_num(9e9), plain.nan_to_num(9e9))


@pytest.mark.parametrize("step", [([1, 37, 90], []), ([17, 64], [(40, 40), (3, 66)])], ids=str)
def test_a_worklist_over_8_bit_keys_is_one_over_their_numbers(step):
    case = make_case(6, 2, 24, 16, *step)
    k, v = on_the_grid(case.k), on_the_grid(case.v)
    plain = TorchAttention().forward(case.q, k, v, on_the_grid(case.cache), case.meta, 24**-0.5)
    meta = as_ragged(case, padding=0, target=4)
    attention = TritonAttention()
    out = attention.forward(
        case.q, k, v, to_stored(case.cache, FP8), attention.prepare(meta), 24**-0.5
    )
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-5)


def test_what_is_too_large_is_cut_and_not_lost():
    """The form has no infinity: beyond its largest number a plain conversion gives NaN."""
    k = torch.tensor([1e6, -1e6, 449.0, 3.0], device=DEVICE).view(1, 1, 4)
    cache = torch.zeros(2, 1, 2, 1, 4, dtype=FP8, device=DEVICE)
    store_kv(k, -k, cache, torch.tensor([1], device=DEVICE))
    assert cache[0, 0, 1, 0].tolist() == [448.0, -448.0, 448.0, 3.0]
    assert cache[1, 0, 1, 0].tolist() == [-448.0, 448.0, -448.0, -3.0]


@pytest.mark.parametrize("seed", range(5))
def test_the_error_stays_within_what_half_a_step_of_the_form_allows(seed):
    """Half a step of e4m3 is 2^-4 of a number, or 2^-10 below the normal ones.

    It moves a score by at most epsilon, hence the weights by a factor of exp(2 epsilon).
    """
    torch.manual_seed(seed)
    q, k, v = torch.randn(1, 2, 16), torch.randn(40, 1, 16), torch.randn(40, 1, 16)
    error = (dense_attention(q, on_the_grid(k), on_the_grid(v)) - dense_attention(q, k, v)).abs()
    half = {name: 2**-4 * t.abs() + 2**-10 for name, t in (("k", k), ("v", v))}
    epsilon = float(torch.einsum("qhd,kgd->hk", q.abs(), half["k"]).max()) * 16**-0.5
    allowed = math.expm1(2 * epsilon) * float(v.abs().max()) + float(half["v"].max())
    assert 0 < float(error.max()) <= allowed


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 0.25)])
def test_the_fused_kernel_stores_what_the_plain_one_does(scales):
    """Scales that need no rounding: the interpreter rounds some of these numbers wrongly."""
    torch.manual_seed(0)
    heads, kv_heads, head_dim, num_tokens = 4, 2, 16, 5
    # Without rotation (position 0) keys are stored as they are.
    qkv = on_the_grid(torch.randn(num_tokens, (heads + 2 * kv_heads) * head_dim)).to(DEVICE)
    table = cos_sin_table(RopeConfig(), head_dim, 4, torch.device(DEVICE))
    positions = torch.zeros(num_tokens, dtype=torch.int64, device=DEVICE)
    slots = torch.tensor([9, -1, 2, 23, 0], device=DEVICE)
    ours, expected = torch.zeros(2, 2, 6, 4, kv_heads, head_dim, device=DEVICE).to(FP8)
    qk_norm_rope_store(qkv, None, None, 1e-5, table, positions, ours, slots, scales)
    split = qkv.view(num_tokens, -1, head_dim).split((heads, kv_heads, kv_heads), dim=1)
    store_kv(split[1] / scales[0], split[2] / scales[1], expected, slots)
    assert torch.equal(ours.float(), expected.float())


def test_flash_attention_is_refused_for_8_bit_keys(monkeypatch):
    from engine.attention.flash_backend import FlashAttention

    monkeypatch.setattr(FlashAttention, "check", lambda *_: None)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype.*flash_attn"):
        select_backend("flash_attn", 64, 256, torch.bfloat16, "cpu", FP8)
    assert select_backend("auto", 64, 256, torch.bfloat16, "cpu", FP8).name == "torch"
