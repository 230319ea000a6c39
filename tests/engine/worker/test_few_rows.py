"""The short way through the layers gives what the layers give, at every number of rows it takes."""

from __future__ import annotations

import pytest
import torch
from kernel_testing import KERNEL_DEVICE as DEVICE

from engine.attention.base import AttentionMetadata
from engine.attention.torch_backend import TorchAttention
from engine.attention.triton_backend import TritonAttention
from engine.distributed.group import TpGroup
from engine.models.build import build_model
from engine.models.config import resolve_model_config
from engine.models.loader import init_dummy_weights
from engine.models.presets import PRESETS
from engine.worker.few_rows import MOST_ROWS, FewRows, serves

BLOCK_SIZE, WIDTH = 16, 24


def build(shape, backend, fused, dtype=torch.float32):
    config = resolve_model_config({**PRESETS[shape], "head_dim": 16}, ())
    model = build_model(config, TpGroup(), backend, dtype, DEVICE, fused=fused)
    init_dummy_weights(model, 0)
    return config, model


def decode_case(config, contexts):
    """Ids, positions, caches and metadata of decode rows; 0 is a padded row."""
    num_rows = len(contexts)
    shape = (2, num_rows * WIDTH, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    caches = [torch.randn(shape, device=DEVICE) for _ in range(config.num_layers)]
    tables = torch.randperm(num_rows * WIDTH).int().view(num_rows, WIDTH)
    lens = torch.tensor(contexts, dtype=torch.int32)
    positions = (lens.long() - 1).clamp(min=0)
    blocks = tables.gather(1, (positions // BLOCK_SIZE)[:, None])[:, 0].long()
    slots = torch.where(lens > 0, blocks * BLOCK_SIZE + positions % BLOCK_SIZE, -1)
    ids = torch.randint(0, config.vocab_size, (num_rows,))
    meta = AttentionMetadata(
        slots.to(DEVICE), num_rows, tables.to(DEVICE), lens.to(DEVICE), WIDTH * BLOCK_SIZE
    )
    return ids.to(DEVICE), positions.to(DEVICE), caches, meta


@pytest.mark.parametrize(
    ("shape", "num_rows"),
    [("tiny-qwen3", 1), ("tiny-llama", 3), ("tiny-qwen3", 8), ("tiny-llama", MOST_ROWS)],
)
def test_few_rows_give_the_layers_output_and_cache(shape, num_rows):
    torch.manual_seed(num_rows)
    config, model = build(shape, TritonAttention(), fused=True)
    contexts = [(17 * row + 1) % 300 + 1 for row in range(num_rows)]
    contexts[-1] = 0 if num_rows > 1 else 290
    case = decode_case(config, contexts)
    ids, positions, caches, meta = case
    _, reference = build(shape, TorchAttention(), fused=False)
    expected_caches = [cache.clone() for cache in caches]
    expected = reference(ids, positions, expected_caches, meta)

    few_rows = FewRows(config.num_kv_heads, torch.device(DEVICE))
    assert few_rows.takes(meta, num_rows)
    out = few_rows.forward(model, ids, positions, caches, meta)

    valid = torch.tensor(contexts, device=DEVICE) > 0
    torch.testing.assert_close(out[valid], expected[valid], rtol=1e-4, atol=1e-4)
    assert torch.isfinite(out).all()
    for ours, theirs in zip(caches, expected_caches, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    logits = few_rows.logits(model, out)
    torch.testing.assert_close(logits, model.compute_local_logits(out), rtol=1e-4, atol=1e-4)


def test_what_is_taken_over():
    config, model = build("tiny-qwen3", TritonAttention(), fused=True, dtype=torch.bfloat16)
    half = torch.empty(1, dtype=torch.bfloat16)
    assert serves(model, "triton", half)
    assert not serves(model, "flash_attn", half)
    assert not serves(model, "triton", half.float()), "a cache of another dtype"
    few_rows = FewRows(config.num_kv_heads, torch.device(DEVICE))
    _, _, _, meta = decode_case(config, [5] * (MOST_ROWS + 1))
    assert not few_rows.takes(meta, MOST_ROWS + 1), "too many rows"
    _, _, _, meta = decode_case(config, [5])
    assert not few_rows.takes(meta, 4), "a step with chunks"
