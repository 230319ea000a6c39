"""What a `model_type` says about its layers: the fields that a row of the allow-list fills in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypedDict

# A truth of the class, or the config key that holds it.
Flag = bool | str


class AttentionBiases(TypedDict):
    """Fields of `Family` that many rows share."""

    qkv_bias: Flag
    out_bias: Flag


class Biases(AttentionBiases):
    """The same for rows that have biases everywhere."""

    mlp_bias: Flag


class Norms(TypedDict):
    """The same for norms."""

    norm_width: int


ATTENTION_BIASES: AttentionBiases = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of a family: config keys of its sizes, and which layers have it.

    `width` is the inner size of an expert. Every token also passes a shared MLP: of `shared_width`,
    or of the `shared_count` times `width`; `shared_gate` weighs it. Layers follow `layers`:
    "all", "after first" (`first_k_dense_replace`), "sparse step" or "range".
    """

    count: str
    per_token: str
    width: str
    shared_width: str = ""
    shared_count: str = ""
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    layers: str = "all"


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the allow-list.

    `norms` vectors of the hidden size stand in a layer; each has `norm_width` parameters a channel
    (2 with a bias, 0 without any). `qk_norm` is "" or what one vector spans: "head" (shared by the
    heads), "heads" (one per head) or "width"; `qk_norm_if` is the key that turns it on. `window`
    is how layers get a sliding window: "" never, "all", "late" (`max_window_layers`) or "pattern"
    (all but every `window_every`-th). Heads share KV where `grouped`. `latent` attention keeps a
    compressed KV.
    """

    defaults: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict)
    gated: bool = True
    grouped: bool = True
    qkv_bias: Flag = False
    out_bias: Flag = False
    mlp_bias: Flag = False
    head_bias: Flag = False
    norms: int = 2
    norm_width: int = 1
    qk_norm: str = ""
    qk_norm_if: Flag = True
    qk_norm_width: int = 1
    window: str = ""
    window_every: int = 0
    window_if: Flag = True
    experts: Experts | None = None
    latent: bool = False
    mlp_inner: str = "intermediate_size"
    sinks: bool = False
    extra_layer_params: int = 0
    learned_positions: int | None = None  # rows beyond max_position_embeddings
    positions: str = "rope"
    notes: tuple[str, ...] = ()


def sizes(
    heads: int, kv_heads: int | None, vocab: int, positions: int, tied: bool = False,
    **more: int | bool,
) -> Mapping[str, Any]:  # fmt: skip
    """The defaults of a config class."""
    return MappingProxyType(
        {
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocab,
            "max_position_embeddings": positions,
            "tie_word_embeddings": tied,
            **more,
        }
    )
