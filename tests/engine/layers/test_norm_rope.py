"""RMSNorm leaves its inputs alone; RoPE's angles are HF's for every scaling type."""

import pytest
import torch
import transformers
from model_testing import ROPES, rope_raw
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from engine.errors import UnsupportedModel
from engine.layers.norm import RMSNorm, add_rms_norm, rms_norm
from engine.layers.rope import apply_rope, cos_sin_table, inverse_frequencies
from engine.layers.rope_config import resolve_rope

POSITIONS = (0, 1, 1000, 8192, 20000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_hf(dtype):
    torch.manual_seed(0)
    x = torch.randn(7, 48).to(dtype)
    hf = Qwen3RMSNorm(48, eps=1e-5).to(dtype)
    hf.weight.data.uniform_(0.5, 1.5)
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {}
    torch.testing.assert_close(rms_norm(x, hf.weight.data, 1e-5), hf(x).data, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_never_write_to_their_inputs(dtype):
    """BUG-B35: in float32 a cast is no copy, so an in-place operation would destroy the input."""
    torch.manual_seed(1)
    x, residual = torch.randn(5, 32).to(dtype), torch.randn(5, 32).to(dtype)
    before = x.clone(), residual.clone()
    norm = RMSNorm(32, 1e-6, dtype, torch.device("cpu"), fused=False)
    norm.weight.fill_(1.25)
    out, total = norm.add(x, residual)
    alone = norm(x)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    pointers = {t.data_ptr() for t in (x, residual, out, total, alone)}
    assert len(pointers) == 5, "an output aliases another tensor"


def test_the_fp32_residual_is_the_exact_sum():
    x, residual = torch.randn(5, 32), torch.randn(5, 32)
    out, total = add_rms_norm(x, residual, torch.ones(32), 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, rms_norm(x + residual, torch.ones(32), 1e-6))


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("kind", ROPES)
def test_rope_angles_are_hfs_at_far_positions(kind, head_dim):
    """BUG-C62: an ignored or wrong scaling shows only far from position 0."""
    raw = rope_raw(kind)
    table = cos_sin_table(resolve_rope(raw), head_dim, max(POSITIONS) + 1, torch.device("cpu"))
    config = transformers.LlamaConfig(
        hidden_size=head_dim * 2, num_attention_heads=2, head_dim=head_dim, **raw
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(0), torch.tensor([POSITIONS]))
    ours = table[list(POSITIONS)]
    expected = torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=-1)
    # The angle at 20,000 is only known to about 1e-3 in float32: both must round alike.
    torch.testing.assert_close(ours, expected.data, rtol=0, atol=2e-3 if "yarn" in kind else 1e-5)


@pytest.mark.parametrize("kind", [k for k in ROPES if k != "default"])
def test_ignoring_the_scaling_would_be_seen(kind):
    scaled, _ = inverse_frequencies(resolve_rope(rope_raw(kind)), 64)
    plain, _ = inverse_frequencies(resolve_rope(rope_raw("default")), 64)
    angles = 8192 * torch.stack((scaled, plain))
    features = torch.cat((angles.cos(), angles.sin()), dim=-1)
    assert torch.nn.functional.cosine_similarity(features[0], features[1], dim=0) < 0.99


def test_application_equals_hf():
    torch.manual_seed(2)
    table = cos_sin_table(resolve_rope(rope_raw("default")), 32, 64, torch.device("cpu"))
    x = torch.randn(9, 3, 32)
    rows = table[10:19]
    cos, sin = (half.repeat(1, 2)[None] for half in rows.chunk(2, dim=-1))
    hf, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    torch.testing.assert_close(apply_rope(x, rows), hf[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


def test_both_forms_of_the_config_mean_the_same():
    """BUG-C13: newer configs carry a dict with the theta inside, older ones two keys."""
    new = {
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
    }
    old = {
        "max_position_embeddings": 4096,
        "rope_theta": 5e5,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    assert resolve_rope(new) == resolve_rope(old)
    default = {"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "default"}}
    assert resolve_rope(default) == resolve_rope({"max_position_embeddings": 4096})


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0]}, "longrope"),
        ({"type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": -1.0}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "per layer type"),
    ],
)
def test_what_is_not_implemented_is_refused(params, word):
    """BUG-B36: never ignored."""
    with pytest.raises(UnsupportedModel, match=word):
        resolve_rope({"max_position_embeddings": 4096, "rope_parameters": params})
