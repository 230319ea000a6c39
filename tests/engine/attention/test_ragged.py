"""Attention over a worklist equals dense attention, however the step is cut."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_testing import KERNEL_DEVICE as DEVICE
from test_attention_backends import make_case

from engine.attention.base import AttentionMetadata
from engine.attention.triton_backend import TritonAttention
from engine.kernels import ragged
from engine.kernels.worklist import Worklist, fill_worklist


def as_ragged(case, dtype=torch.float32, padding=3, target=None):
    """The case's step as a worklist, with some padded rows behind it."""
    meta, q = case.meta, case.q.to(dtype)
    num_heads, head_dim = q.shape[1:]
    tables = meta.decode_block_tables
    contexts, lens = meta.decode_context_lens.tolist(), [1] * meta.num_decodes
    if meta.num_chunks:
        tables = torch.cat([tables, meta.chunk_block_tables])
        contexts += meta.chunk_context_lens.tolist()
        lens += meta.cu_seqlens_q.diff().tolist()
    assert min(contexts) > 0, "a padded decode row is no sequence of a worklist"
    starts = [sum(lens[:i]) for i in range(len(lens))]
    columns = (range(len(lens)), starts, lens, contexts)
    columns = [torch.tensor([*c, 0], dtype=torch.int32, device=DEVICE) for c in columns]
    sizes = ragged.ragged_sizes(num_heads, case.k.shape[1], head_dim, dtype, q.device)
    if target is not None:
        sizes = dataclasses.replace(sizes, target=target, min_part=sizes.key_multiple)
    out = torch.full((q.shape[0] + padding, num_heads, head_dim), 7.0, dtype=dtype, device=DEVICE)
    work = Worklist.new(tables, out, len(lens) + 1, sizes)
    fill_worklist(work, sizes, *columns, len(lens) + 1)
    pad = torch.full((padding,), -1, dtype=torch.int64, device=DEVICE)
    return AttentionMetadata(
        slot_mapping=torch.cat([meta.slot_mapping, pad]),
        num_decodes=0,
        decode_block_tables=tables,
        decode_context_lens=columns[3],
        max_decode_context=0,
        work=work,
    )


def run(case, dtype=torch.float32, padding=3, **how):
    meta = as_ragged(case, dtype, padding, **how)
    backend = TritonAttention()
    q, k, v = (
        torch.cat([t, torch.zeros(padding, *t.shape[1:], device=DEVICE)]).to(dtype)
        for t in (case.q, case.k, case.v)
    )
    cache, scale = case.cache.to(dtype), q.shape[-1] ** -0.5
    out = backend.forward(q, k, v, cache, backend.prepare(meta), scale)
    assert not meta.work.arrived.any(), "the counters must be zero for the next launch"
    if padding:
        assert not out[-padding:].any()
    return out[: len(case.q)]


STEPS = {
    "decodes": ([1, 37, 90], []),
    "chunks": ([], [(5, 5), (33, 50), (1, 70)]),
    "both": ([17, 64], [(40, 40), (3, 66)]),
}


@pytest.mark.parametrize("target", [1, 4, 50])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", [(4, 2, 16, 16), (6, 2, 24, 48), (3, 1, 64, 32)])
def test_ragged_attention_is_dense_attention(shape, step, target):
    case = make_case(*shape, *STEPS[step])
    torch.testing.assert_close(run(case, target=target), case.expected, rtol=1e-4, atol=1e-5)


def test_a_second_launch_finds_its_counters():
    case = make_case(4, 2, 16, 16, [100, 3], [(9, 80)])
    meta = as_ragged(case, target=40, padding=0)
    backend = TritonAttention()
    outs = []
    for _ in range(2):
        args = (case.q, case.k, case.v, case.cache)
        outs.append(backend.forward(*args, meta, 0.25).clone())
    assert torch.equal(*outs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(9, 3, 64), (32, 8, 80), (16, 8, 128), (32, 8, 128), (8, 4, 256)]
)
def test_ragged_attention_in_half_precision(shape, dtype):
    steps = [
        ([1, 300, 1500, 64, 65], [(1, 1), (130, 130), (70, 900), (257, 300)]),
        ([], [(20, 3000)]),
    ]
    for decodes, chunks in steps:
        for block_size in (16, 48, 256):
            case = make_case(*shape, block_size, decodes, chunks)
            out = run(case, dtype).float()
            error = ((out - case.expected).norm() / case.expected.norm()).item()
            assert error < 8 * torch.finfo(dtype).eps
