"""Half precision on a real GPU: kernels against float32 references, and under CUDA graphs."""

import pytest
import torch
from test_attention_backends import make_case

from engine.attention.base import AttentionMetadata
from engine.attention.torch_backend import TorchAttention
from engine.attention.triton_backend import TritonAttention
from engine.layers.mlp import silu_mul
from engine.layers.norm import add_rms_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.bfloat16, torch.float16]
STEP = ([1, 300, 0, 1500, 64, 65], [(1, 1), (130, 130), (70, 900), (257, 300)])


def relative_error(out, truth):
    return ((out.float() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", ["wide", "short chunk, long prefix"])
@pytest.mark.parametrize("block_size", [16, 48, 64, 256])
@pytest.mark.parametrize(
    "shape", [(9, 3, 64), (32, 8, 80), (32, 8, 96), (16, 8, 128), (64, 8, 128), (8, 4, 256)]
)
def test_triton_attention_in_half_precision(shape, block_size, dtype, step):
    decodes, chunks = STEP if step == "wide" else ([], [(20, 3000)])
    case = make_case(*shape, block_size, decodes, chunks)
    q, k, v, cache = (t.to(dtype) for t in (case.q, case.k, case.v, case.cache))
    backend = TritonAttention()
    meta = backend.prepare(case.meta)
    out = backend.forward(q, k, v, cache, meta, shape[2] ** -0.5)
    assert torch.isfinite(out).all()
    limit = 8 * torch.finfo(dtype).eps
    assert relative_error(out, case.expected) < limit
    if decodes:
        assert not out[2].any(), "a padded row gets zeros"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_captured_decode_follows_its_buffers(dtype):
    """The grid is fixed at capture; lengths, tables and padding may change before each replay."""
    rows, width, block_size, bound = 40, 64, 16, 1024
    cache = torch.randn(2, 600, block_size, 8, 128, device="cuda").to(dtype)
    q = torch.randn(rows, 16, 128, device="cuda").to(dtype)
    tables = torch.zeros(rows, width, dtype=torch.int32, device="cuda")
    lens = torch.zeros(rows, dtype=torch.int32, device="cuda")
    slots = torch.full((rows,), -1, device="cuda")
    meta = AttentionMetadata(slots, rows, tables, lens, bound)
    backend = TritonAttention()

    def run():
        return backend.forward(q, None, None, cache, backend.prepare(meta), 0.1)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    generator = torch.Generator().manual_seed(0)
    for longest in (1, 17, 500, bound):
        new = torch.randint(0, longest + 1, (rows,), generator=generator).int()
        lens.copy_(new)
        tables.copy_(torch.randint(0, 600, (rows, width), generator=generator).int())
        graph.replay()
        expected = TorchAttention().forward(q.float(), None, None, cache.float(), meta, 0.1)
        torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
        assert not out[lens == 0].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_kernels_round_once(dtype):
    """Fused results are those of the float32 reference, rounded to the dtype."""
    from engine.kernels.activation import fused_silu_mul
    from engine.kernels.norm import fused_add_rms_norm

    x, residual = torch.randn(2, 300, 4096, device="cuda").to(dtype)
    weight = torch.rand(4096, device="cuda").to(dtype)
    out, total = fused_add_rms_norm(x, residual, weight, 1e-6)
    expected, expected_total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(fused_silu_mul(x), silu_mul(x))


def test_sampling_is_the_same_on_both_devices():
    """Equal random numbers; a draw may differ only where two scores are within rounding."""
    from engine.sampler import SamplingBatch, sample

    rows, vocab = 64, 151_936
    logits = (torch.randn(rows, vocab) * 2).to(torch.bfloat16)
    columns = (torch.rand(rows) * 1.5, torch.arange(rows) - 30, torch.arange(rows) * 7)
    on_cpu = sample(logits, SamplingBatch(*columns))
    on_gpu = sample(logits.cuda(), SamplingBatch(*(c.cuda() for c in columns))).cpu()
    assert (on_cpu != on_gpu).sum() <= 1
