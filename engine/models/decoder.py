"""The decoder: every supported family, dense or sparse, is a setting of it, not a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.attention.base import AttentionBackend, AttentionMetadata
from engine.distributed.group import TpGroup
from engine.layers.embedding import OutputHead, VocabParallelEmbedding, VocabParallelWeight
from engine.layers.fp8_config import Fp8Config, fp8_for
from engine.layers.mlp import SwiGLU
from engine.layers.moe import SparseMoe
from engine.layers.norm import RMSNorm
from engine.layers.rope import cos_sin_table
from engine.layers.self_attention import AttentionShape, SelfAttention
from engine.layers.sharding import Shard
from engine.layers.weights import WeightSlice, kv_scale_names
from engine.models.config import ModelConfig


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm that also adds the residual."""

    def __init__(
        self,
        config: ModelConfig,
        group: TpGroup,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        fused: bool,
        index: int,
        expert_parallel: bool = False,
        fp8: Fp8Config | None = None,
    ) -> None:
        super().__init__()
        prefix = f"model.layers.{index}."

        def stored(block: str, names: Sequence[str]) -> Fp8Config | None:
            return fp8_for(fp8, [f"{prefix}{block}.{name}" for name in names])

        shape = AttentionShape(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.qkv_bias,
            config.o_bias,
            config.qk_norm,
            config.rms_norm_eps,
        )
        norm = (config.hidden_size, config.rms_norm_eps, dtype, device, fused)
        qkv = stored("self_attn", ("q_proj", "k_proj", "v_proj"))
        out = stored("self_attn", ("o_proj",))
        self.input_norm = RMSNorm(*norm, qkv)
        self.attention = SelfAttention(shape, group, backend, dtype, device, fused, qkv, out)
        size = config.hidden_size
        self.mlp: SwiGLU | SparseMoe
        moe = config.moe
        dense = ("gate_proj", "up_proj", "down_proj")
        if moe is not None and index in moe.sparse_layers:
            self.mlp_name = moe.family.block
            self.post_norm = RMSNorm(*norm)  # the router reads it too
            names = [f"{e}.{part}" for e in range(moe.num_experts) for part in moe.family.parts]
            experts = stored(f"{self.mlp_name}.experts", names)
            shared = stored(f"{self.mlp_name}.shared_expert", dense)
            self.mlp = SparseMoe(
                size, moe, group, dtype, device, fused, expert_parallel, experts, shared
            )
        else:
            self.mlp_name = "mlp"
            width, mlp = config.intermediate_size, stored("mlp", dense)
            self.post_norm = RMSNorm(*norm, mlp)
            self.mlp = SwiGLU(size, width, config.mlp_bias, group, dtype, device, fused, mlp)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        cos_sin: Tensor,
        kv_cache: Tensor,
        meta: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """(output still to be added, residual stream); the first layer has no residual yet."""
        if residual is None:
            residual, normed = hidden, self.input_norm(hidden)
        else:
            normed, residual = self.input_norm.add(hidden, residual)
        hidden = self.attention(normed, positions, cos_sin, kv_cache, meta)
        normed, residual = self.post_norm.add(hidden, residual)
        return self.mlp(normed), residual

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Slices of the layer, named as HF names them."""
        yield from self.input_norm.weight_slices(f"{prefix}input_layernorm.")
        yield from self.attention.weight_slices(f"{prefix}self_attn.")
        yield from self.post_norm.weight_slices(f"{prefix}post_attention_layernorm.")
        yield from self.mlp.weight_slices(f"{prefix}{self.mlp_name}.")


class FewRowsForward(Protocol):
    """Another way through the same layers, for steps with few rows."""

    def takes(self, meta: AttentionMetadata, num_tokens: int) -> bool: ...  # noqa: D102
    def forward(  # noqa: D102
        self,
        model: Decoder,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        meta: AttentionMetadata,
    ) -> Tensor: ...
    def takes_logits(self, num_rows: int) -> bool: ...  # noqa: D102
    def logits(self, model: Decoder, hidden: Tensor) -> Tensor: ...  # noqa: D102


class Decoder(nn.Module):
    """A decoder over a paged KV cache; one rank's shard of it."""

    def __init__(
        self,
        config: ModelConfig,
        group: TpGroup,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        fused: bool,
        max_position: int,
        expert_parallel: bool = False,
        fp8: Fp8Config | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        vocab = (config.vocab_size, config.hidden_size, group, dtype, device)
        self.embedding = VocabParallelEmbedding(*vocab)
        self.layers = nn.ModuleList(
            DecoderLayer(config, group, backend, dtype, device, fused, i, expert_parallel, fp8)
            for i in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device, fused)
        table = self.embedding if config.tie_word_embeddings else VocabParallelWeight(*vocab)
        self.head = OutputHead(table)
        cos_sin = cos_sin_table(config.rope, config.head_dim, max_position, device)
        self.register_buffer("cos_sin", cos_sin, persistent=False)
        self.cos_sin: Tensor
        # Takes over the steps that it `takes`, if a runner has set it.
        self.few_rows: FewRowsForward | None = None

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        meta: AttentionMetadata,
    ) -> Tensor:
        """Final hidden states [T, H] for int64 ids and positions [T].

        `kv_caches` holds one [2, blocks, block_size, Hkv, D] tensor per layer.
        """
        if self.few_rows is not None and self.few_rows.takes(meta, input_ids.shape[0]):
            return self.few_rows.forward(self, input_ids, positions, kv_caches, meta)
        meta = self.backend.prepare(meta)
        hidden = self.embedding(input_ids)
        residual: Tensor | None = None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden, residual = layer(hidden, residual, positions, self.cos_sin, kv_cache, meta)
        assert residual is not None  # a model has at least one layer
        normed = self.norm.add(hidden, residual)[0]
        assert isinstance(normed, Tensor)  # the last norm has no quantised reader
        return normed

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocab] for chosen rows of the hidden states, equal on every rank."""
        return self.head(hidden)

    def compute_local_logits(self, hidden: Tensor) -> Tensor:
        """The columns of the logits that this rank computes: `local_vocab` of the vocabulary."""
        return self.head.local(hidden)

    @property
    def num_layer_weights(self) -> int:
        """Numbers in this rank's layers that a token meets: of the experts, those it visits."""
        total = sum(parameter.numel() for parameter in self.layers.parameters())
        for block in self.layers.modules():
            if isinstance(block, SparseMoe):
                experts = sum(parameter.numel() for parameter in block.experts.parameters())
                total -= experts - experts * block.moe.num_experts_per_tok // block.moe.num_experts
        return total

    @property
    def local_vocab(self) -> Shard:
        """The part of the vocabulary that this rank's head holds."""
        return self.head.table.rows

    def weight_slices(self) -> Iterator[WeightSlice]:
        """Every slice of every parameter, named as HF names them."""
        yield from self.embedding.weight_slices("model.embed_tokens.")
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield from layer.weight_slices(f"model.layers.{i}.")
        yield from self.norm.weight_slices("model.norm.")
        if not self.config.tie_word_embeddings:
            yield from self.head.table.weight_slices("lm_head.")

    def set_kv_scales(self, scales: Sequence[tuple[float, float]]) -> None:
        """What keys and values of each layer are divided by in a cache of 8-bit floats."""
        for layer, pair in zip(self.layers, scales, strict=True):
            assert isinstance(layer, DecoderLayer)
            layer.attention.kv_scales = pair

    def ignored_weights(self) -> frozenset[str]:
        """A tied head may be stored as well; old checkpoints store the rotary frequencies."""
        names = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(len(self.layers))}
        # Read apart, and only where the KV cache holds 8-bit floats.
        names.update(name for i in range(len(self.layers)) for name in kv_scale_names(i))
        if self.config.tie_word_embeddings:
            names.add("lm_head.weight")
        return frozenset(names)
