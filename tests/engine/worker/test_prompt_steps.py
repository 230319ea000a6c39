"""A padded step with chunks goes through the model as the unpadded one does."""

from __future__ import annotations

from array import array

import torch
from kernel_testing import KERNEL_DEVICE as DEVICE

from engine.attention.torch_backend import TorchAttention
from engine.attention.triton_backend import TritonAttention
from engine.distributed.group import TpGroup
from engine.kernels.ragged import ragged_sizes
from engine.models.build import build_model
from engine.models.config import resolve_model_config
from engine.models.loader import init_dummy_weights
from engine.models.presets import PRESETS
from engine.worker.batch_state import BatchState
from engine.worker.command import ChunkCommand, StepCommand
from engine.worker.inputs import mixed_step_inputs
from engine.worker.prompt_steps import PromptSteps

NUM_SLOTS, WIDTH, BLOCK_SIZE = 5, 6, 16


def build(config, backend, fused):
    model = build_model(config, TpGroup(), backend, torch.float32, DEVICE, fused=fused)
    init_dummy_weights(model, 0)
    return model


def mixed_command():
    """Two decodes, a chunk behind a prefix, a whole prompt, and a chunk that is not the last."""
    ids = array("q", range(7, 40))
    return StepCommand(
        step=0,
        num_decodes=2,
        decode_slots=array("q", [3, 0]),
        decode_positions=array("q", [70, 15]),
        table_index=array("q"),
        table_blocks=array("q"),
        chunks=(
            ChunkCommand(1, 40, ids[:5], True),
            ChunkCommand(4, 0, ids[:33], True),
            ChunkCommand(2, 0, ids[:9], False),
        ),
    )


def test_hidden_states_and_cache_are_those_of_the_unpadded_step():
    torch.manual_seed(0)
    device = torch.device(DEVICE)
    config = resolve_model_config(PRESETS["tiny-qwen3"], ())
    command = mixed_command()
    tables = torch.randperm((NUM_SLOTS + 1) * WIDTH).int().view(NUM_SLOTS + 1, WIDTH)
    states = [BatchState(NUM_SLOTS, NUM_SLOTS, WIDTH, BLOCK_SIZE, device) for _ in range(2)]
    for state in states:
        state.block_tables.copy_(tables)
        state.last_tokens.copy_(torch.arange(NUM_SLOTS + 1) + 100)
        state.apply(command)
    shape = (2, tables.numel(), BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    caches = [torch.randn(shape, device=device) for _ in range(config.num_layers)]
    expected_caches = [cache.clone() for cache in caches]

    wanted = mixed_step_inputs(command, states[1], WIDTH * BLOCK_SIZE)
    reference = build(config, TorchAttention(), fused=False)
    expected = reference(wanted.input_ids, wanted.positions, expected_caches, wanted.meta)

    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    cut = ragged_sizes(*heads, torch.float32, device)
    out = torch.empty(64, config.num_heads, config.head_dim, device=device)
    steps = PromptSteps((64,), states[0], cut, out)
    steps.take(command)
    padded = steps.lay_out(64)
    model = build(config, TritonAttention(), fused=True)
    hidden = model(padded.input_ids, padded.positions, caches, padded.meta)

    used = expected.shape[0]
    torch.testing.assert_close(hidden[:used], expected, rtol=1e-4, atol=1e-4)
    assert torch.isfinite(hidden).all()
    for ours, theirs in zip(caches, expected_caches, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
