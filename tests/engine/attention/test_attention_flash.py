"""What the flash_attn backend hands to FlashAttention-2, checked by a stand-in of the package."""

import sys
from types import ModuleType

import pytest
import torch
from test_attention_backends import STEPS, dense_attention, make_case

from engine.attention.flash_backend import FlashAttention


def keys_of(cache, table, length):
    size = cache.shape[1]
    return cache[table[: -(-length // size)].long()].flatten(0, 1)[:length]


def flash_attn_with_kvcache(
    q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale, causal
):
    assert causal and q.shape[1] == 1
    assert softmax_scale == pytest.approx(q.shape[-1] ** -0.5)
    out = torch.zeros_like(q)
    for row, length in enumerate(cache_seqlens.tolist()):
        if length:
            k, v = (keys_of(c, block_table[row], length) for c in (k_cache, v_cache))
            out[row] = dense_attention(q[row], k, v)
    return out


def flash_attn_varlen_func(
    q,
    k_cache,
    v_cache,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    block_table,
):
    assert causal and cu_seqlens_k.dtype == cu_seqlens_q.dtype == torch.int32
    lengths, queries = cu_seqlens_k.diff().tolist(), cu_seqlens_q.diff().tolist()
    assert (max(queries), max(lengths)) == (max_seqlen_q, max_seqlen_k)
    out = torch.empty_like(q)
    for row, length in enumerate(lengths):
        rows = slice(int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1]))
        k, v = (keys_of(c, block_table[row], length) for c in (k_cache, v_cache))
        out[rows] = dense_attention(q[rows], k, v)
    return out


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("step", STEPS)
def test_flash_attention_gets_the_steps_sequences(monkeypatch, step, prepared):
    module = ModuleType("flash_attn")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    case = make_case(4, 2, 16, 256, *STEPS[step])
    backend = FlashAttention()
    meta = backend.prepare(case.meta) if prepared else case.meta
    out = backend.forward(case.q, case.k, case.v, case.cache, meta, 0.25)
    torch.testing.assert_close(out, case.expected, rtol=1e-5, atol=1e-5)
