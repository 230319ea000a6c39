"""Every backend equals plain dense attention over the unpaged keys."""

import importlib.util
from dataclasses import dataclass

import pytest
import torch
from kernel_testing import KERNEL_DEVICE as DEVICE

from engine.attention.base import AttentionMetadata
from engine.attention.select import select_backend
from engine.attention.torch_backend import TorchAttention
from engine.attention.triton_backend import TritonAttention
from engine.core.errors import ConfigError
from engine.kernels.paged_decode import DecodeTuning, num_splits, paged_decode
from engine.kernels.paged_prefill import paged_prefill


@dataclass
class Case:
    """A step with its inputs, the cache before it, and the dense keys and values per row."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache: torch.Tensor
    meta: AttentionMetadata
    expected: torch.Tensor


def make_case(heads, kv_heads, head_dim, block_size, decodes, chunks, seed=0):
    """`decodes` are context lengths (0: a padded row), `chunks` are (queries, context)."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE)

    contexts = [*decodes, *(c for _, c in chunks)]
    queries = [1] * len(decodes) + [n for n, _ in chunks]
    num_blocks = sum(-(-c // block_size) for c in contexts) + 2
    ids = iter(torch.randperm(num_blocks, generator=generator).tolist())
    width = max(-(-c // block_size) for c in contexts) + 1
    # A middle layer of a cache whose unwritten slots are NaN: nothing may leak from them.
    cache = torch.full(
        (2, 3, num_blocks, block_size, kv_heads, head_dim), float("nan"), device=DEVICE
    )[:, 1]
    tables, slots, outs, new = [], [], [], {"q": [], "k": [], "v": []}
    for n, context in zip(queries, contexts, strict=True):
        blocks = [next(ids) for _ in range(-(-context // block_size))]
        tables.append(blocks + [0] * (width - len(blocks)))
        where = [blocks[p // block_size] * block_size + p % block_size for p in range(context)]
        q, k, v = randn(n, heads, head_dim), *randn(2, max(context, 1), kv_heads, head_dim)
        old = max(context - n, 0)
        for part, dense in ((0, k), (1, v)):
            cache[part].flatten(0, 1)[where[:old]] = dense[:old]
        slots += where[old:] if context else [-1]
        for name, value in (("q", q), ("k", k[old:] if context else k), ("v", v[old:])):
            new[name].append(value if context or name == "q" else torch.zeros_like(k))
        outs.append(dense_attention(q, k, v) if context else torch.zeros_like(q))
    nd = len(decodes)

    def ints(values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    bounds = [sum(queries[nd : nd + i]) for i in range(len(chunks) + 1)]
    meta = AttentionMetadata(
        slot_mapping=ints(slots, torch.int64),
        num_decodes=nd,
        decode_block_tables=ints(tables[:nd]).view(nd, width),
        decode_context_lens=ints(decodes),
        max_decode_context=max(decodes, default=0),
        cu_seqlens_q=ints(bounds) if chunks else None,
        chunk_block_tables=ints(tables[nd:]) if chunks else None,
        chunk_context_lens=ints(contexts[nd:]) if chunks else None,
        max_seqlen_q=max((n for n, _ in chunks), default=0),
        max_seqlen_k=max((c for _, c in chunks), default=0),
    )
    stacked = {name: torch.cat(parts) for name, parts in new.items()}
    return Case(**stacked, cache=cache, meta=meta, expected=torch.cat(outs))


def dense_attention(q, k, v):
    """Causal attention of the last n positions, in float64."""
    n, heads, head_dim = q.shape
    group = heads // k.shape[1]
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * head_dim**-0.5
    keys = torch.arange(k.shape[0], device=q.device)
    hidden = keys[None, :] > (keys[-1] - n + 1 + torch.arange(n, device=q.device))[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).float()


SHAPES = [(4, 2, 16), (6, 2, 24), (9, 3, 64), (2, 2, 32)]
STEPS = {
    "decode": ([5, 17, 1, 70], []),
    "padded decode": ([5, 0, 0], []),
    "prefill": ([], [(7, 7), (40, 40)]),
    "later chunk": ([], [(20, 50), (1, 1)]),
    "mixed": ([33, 2], [(5, 37), (18, 18)]),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("backend", "block_size"),
    [
        (TorchAttention, 1),
        (TorchAttention, 3),
        (TorchAttention, 16),
        (TritonAttention, 16),
        (TritonAttention, 64),
    ],
)
def test_backends_equal_dense_attention(backend, block_size, shape, step):
    case = make_case(*shape, block_size, *STEPS[step])
    scale = shape[2] ** -0.5
    out = backend().forward(case.q, case.k, case.v, case.cache, case.meta, scale)
    torch.testing.assert_close(out, case.expected, rtol=1e-5, atol=1e-5)
    stored = backend().forward(case.q, None, None, case.cache, case.meta, scale)
    assert torch.equal(stored, out), "the KV must be in the cache after the first call"


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_split_decode_is_balanced_on_the_device(splits):
    """The grid comes from a bound far above the contexts, as under a graph."""
    case = make_case(4, 2, 16, 16, [1, 31, 33, 0, 200], [])
    TorchAttention().forward(case.q, case.k, case.v, case.cache, case.meta, 0.25)
    tuning = DecodeTuning(
        block_n=16, num_warps=4, num_stages=2, target_programs=10 * splits, min_split=16
    )
    assert num_splits(5, 2, 4096, tuning) == splits
    out = torch.empty_like(case.q)
    meta = case.meta
    paged_decode(
        case.q, case.cache, meta.decode_block_tables, meta.decode_context_lens, 4096, 0.25, out,
        tuning,
    )  # fmt: skip
    torch.testing.assert_close(out, case.expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [2, 8])
def test_a_chunk_behind_a_long_prefix_may_be_split(splits):
    """Parts without any key, and parts in which some rows see no key, weigh nothing."""
    chunks = [(3, 300), (40, 90), (1, 1), (70, 70), (33, 40)]
    case = make_case(4, 2, 16, 16, [], chunks)
    TorchAttention().forward(case.q, case.k, case.v, case.cache, case.meta, 0.25)
    out = torch.empty_like(case.q)
    meta = case.meta
    paged_prefill(
        case.q, case.cache, meta.chunk_block_tables, meta.chunk_context_lens, meta.cu_seqlens_q,
        meta.max_seqlen_q, meta.max_seqlen_k, 0.25, out, splits=splits,
    )  # fmt: skip
    torch.testing.assert_close(out, case.expected, rtol=1e-5, atol=1e-5)


def test_the_order_of_rows_changes_nothing():
    """Many decodes are started longest first; each row still reads and writes its own."""
    contexts = [(7 * i) % 45 for i in range(40)]
    case = make_case(4, 2, 16, 16, contexts, [(3, 9)])
    backend = TritonAttention()
    meta = backend.prepare(case.meta)
    assert meta.decode_order is not None
    assert sorted(meta.decode_order.tolist()) == list(range(40))
    ordered = meta.decode_context_lens[meta.decode_order].tolist()
    assert ordered == sorted(contexts, reverse=True)
    out = backend.forward(case.q, case.k, case.v, case.cache, meta, 0.25)
    torch.testing.assert_close(out, case.expected, rtol=1e-5, atol=1e-5)
    assert backend.prepare(make_case(2, 1, 16, 16, [3, 4], []).meta).decode_order is None


def test_large_scores_do_not_overflow():
    case = make_case(4, 2, 16, 16, [40], [(20, 50)])
    scaled = case.q * 1e3
    reference = case.cache.clone()
    a = TorchAttention().forward(scaled, case.k, case.v, reference, case.meta, 1.0)
    b = TritonAttention().forward(scaled, case.k, case.v, case.cache, case.meta, 1.0)
    assert torch.isfinite(b).all()
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("installed", "head_dim", "block_size", "dtype", "expected"),
    [
        ({"triton", "flash_attn"}, 128, 256, torch.bfloat16, "triton"),
        ({"triton", "flash_attn"}, 64, 16, torch.bfloat16, "triton"),
        ({"triton", "flash_attn"}, 8, 256, torch.float16, "flash_attn"),
        ({"flash_attn"}, 128, 256, torch.bfloat16, "flash_attn"),
        ({"flash_attn"}, 128, 16, torch.bfloat16, "torch"),
        ({"flash_attn"}, 128, 256, torch.float32, "torch"),
        (set(), 128, 256, torch.bfloat16, "torch"),
    ],
)
def test_auto_takes_the_fastest_that_fits(
    monkeypatch, installed, head_dim, block_size, dtype, expected
):
    """On CUDA the Triton kernels were measured to be faster than FlashAttention-2, at 256 too."""

    def find_spec(name):
        return object() if name in installed else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert select_backend("auto", head_dim, block_size, dtype, "cuda").name == expected


def test_auto_takes_what_the_machine_allows():
    backend = select_backend("auto", 64, 16, torch.float32, "cpu")
    assert backend.name == "torch"


@pytest.mark.parametrize(
    ("name", "device", "block_size", "word"),
    [
        ("nope", "cpu", 16, "auto"),
        ("triton", "cpu", 16, "CUDA"),
        ("triton", "cuda", 24, "multiple of 16"),
        ("flash_attn", "cpu", 256, "flash"),
    ],
)
def test_impossible_backends_are_refused(name, device, block_size, word):
    with pytest.raises(ConfigError, match=word):
        select_backend(name, 64, block_size, torch.bfloat16, device)


def test_the_warm_up_needs_no_more_than_one_block():
    """Slots of -1 and tables of zeros over a one-block cache: nothing is written."""
    cache = torch.zeros(2, 1, 16, 2, 16, device=DEVICE)
    q, k = torch.randn(40, 4, 16, device=DEVICE), torch.randn(40, 2, 16, device=DEVICE)

    def ints(values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    meta = AttentionMetadata(
        slot_mapping=torch.full((40,), -1, device=DEVICE),
        num_decodes=0,
        decode_block_tables=ints([]).view(0, 3),
        decode_context_lens=ints([]),
        max_decode_context=0,
        cu_seqlens_q=ints([0, 40]),
        chunk_block_tables=ints([[0, 0, 0]]),
        chunk_context_lens=ints([40]),
        max_seqlen_q=40,
        max_seqlen_k=40,
    )
    for backend in (TorchAttention(), TritonAttention()):
        out = backend.forward(q, k, k, cache, meta, 0.25)
        assert torch.isfinite(out).all()
        assert not cache.any()
