"""Tiny random models, their HF twins, and a minimal runner over a paged cache, for tests."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.attention.base import AttentionMetadata
from engine.attention.torch_backend import TorchAttention
from engine.distributed.group import TpGroup
from engine.models.build import build_model
from engine.models.config import load_model_config
from engine.models.loader import load_weights

COMMON = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


def hf_model(kind, seed=0, dtype=torch.float32, **overrides):
    """An HF model with random weights large enough that every part matters."""
    import transformers

    settings = {**COMMON, **overrides}
    if kind == "Qwen3":
        settings.setdefault("head_dim", 16)
    config = getattr(transformers, f"{kind}Config")(**settings)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.1)
    return model.to(dtype).eval()


def saved(model, folder: Path, **options) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def load(folder, group=None, backend=None, dtype=torch.float32, device="cpu", **options):
    config = load_model_config(folder)
    model = build_model(
        config, group or TpGroup(), backend or TorchAttention(), dtype, device, **options
    )
    load_weights(model, folder)
    return model


def new_caches(model, num_blocks=32, block_size=4, device="cpu"):
    """Per-layer views of one cache filled with NaN: reading an unwritten slot shows."""
    attention = model.layers[0].attention
    shape = (
        2,
        len(model.layers),
        num_blocks,
        block_size,
        attention.num_kv_heads,
        attention.shape.head_dim,
    )
    dtype = model.norm.weight.dtype
    return torch.full(shape, float("nan"), dtype=dtype, device=device).unbind(1)


def step(model, caches, rows, tables, device="cpu"):
    """One forward pass. `rows` is a list of (sequence, token ids, first position).

    Rows with one token and a prefix are decodes and must come first. Returns hidden states.
    """
    block_size = caches[0].shape[2]
    decodes = [r for r in rows if len(r[1]) == 1 and r[2] > 0]
    chunks = rows[len(decodes) :]
    assert rows[: len(decodes)] == decodes
    ids, positions, slots = [], [], []
    for sequence, tokens, first in rows:
        for offset, token in enumerate(tokens):
            position = first + offset
            ids.append(token)
            positions.append(position)
            block = tables[sequence][position // block_size]
            slots.append(block * block_size + position % block_size)
    width = max(len(t) for t in tables.values())

    def table(subset):
        padded = [tables[s] + [0] * (width - len(tables[s])) for s, _, _ in subset]
        return torch.tensor(padded, dtype=torch.int32, device=device).view(len(subset), width)

    def ints(values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=device)

    bounds = [0]
    for _, tokens, _ in chunks:
        bounds.append(bounds[-1] + len(tokens))
    contexts = [first + len(tokens) for _, tokens, first in chunks]
    decode_contexts = [first + 1 for _, _, first in decodes]
    meta = AttentionMetadata(
        slot_mapping=ints(slots, torch.int64),
        num_decodes=len(decodes),
        decode_block_tables=table(decodes),
        decode_context_lens=ints(decode_contexts),
        max_decode_context=max(decode_contexts, default=0),
        cu_seqlens_q=ints(bounds) if chunks else None,
        chunk_block_tables=table(chunks) if chunks else None,
        chunk_context_lens=ints(contexts) if chunks else None,
        max_seqlen_q=max((len(t) for _, t, _ in chunks), default=0),
        max_seqlen_k=max(contexts, default=0),
    )
    with torch.inference_mode():
        return model(ints(ids, torch.int64), ints(positions, torch.int64), caches, meta)


ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8192},
    "yarn-mscale": {
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    "yarn-attention-factor": {
        "factor": 4.0,
        "original_max_position_embeddings": 8192,
        "attention_factor": 0.7,
    },
}


def rope_raw(kind, theta=10000.0):
    params = {"rope_type": kind.split("-")[0], "rope_theta": theta, **ROPES[kind]}
    return {"max_position_embeddings": 32768, "rope_parameters": params}
