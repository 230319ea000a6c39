"""Nemotron-H: layers of one mixer each, attention, MLP, experts or Mamba-2, in any order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.core.errors import InputError
from sim.specs.architecture import (
    ATTENTION,
    EXPERT,
    FULL,
    LINEAR_STATE,
    MLP,
    NO_ATTENTION,
    ROUTER,
    Architecture,
    Layer,
    Matrix,
)
from sim.specs.config_keys import Keys
from sim.specs.family import sizes

_DEFAULTS = sizes(
    32, 8, 131072, 4096, head_dim=128, intermediate_size=21504, ssm_state_size=128,
    mamba_num_heads=128, mamba_head_dim=64, n_groups=8, conv_kernel=4, use_conv_bias=True,
    n_routed_experts=8, n_shared_experts=1, moe_intermediate_size=7688,
    moe_shared_expert_intermediate_size=7688, num_experts_per_tok=2,
)  # fmt: skip
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}


def read_nemotron_h(where: str, name: str, config: Mapping[str, Any]) -> Architecture:
    """The architecture of a `nemotron_h` config.

    Raises:
        InputError: a key has an impossible value, or one that is not modelled.
    """
    keys = Keys(where, config, _DEFAULTS, {})
    if config.get("moe_latent_size"):
        raise InputError(f"{where}: moe_latent_size={config['moe_latent_size']!r}: is not modelled")
    kinds = _kinds(where, config)
    hidden = keys.size("hidden_size")
    layer_of = {
        "linear_attention": _mamba,
        "full_attention": _attention,
        "mlp": _mlp,
        "moe": _mixture,
    }
    layers = {kind: layer_of[kind](keys, hidden) for kind in set(kinds)}
    mixed = "moe" in kinds
    return Architecture(
        name=name,
        model_type="nemotron_h",
        layers=tuple(layers[kind] for kind in kinds),
        hidden_size=hidden,
        vocab_size=keys.size("vocab_size"),
        num_heads=keys.size("num_attention_heads"),
        num_kv_heads=keys.size("num_key_value_heads"),
        head_dim=keys.size("head_dim"),
        intermediate_size=keys.size("intermediate_size"),
        max_position=keys.size("max_position_embeddings"),
        tied_embeddings=bool(keys.get("tie_word_embeddings")),
        stored_dtype="",
        positions="none",
        gated=False,
        norm_params=hidden,
        num_experts=keys.size("n_routed_experts") if mixed else 0,
        experts_per_token=keys.size("num_experts_per_tok") if mixed else 0,
    )


def _kinds(where: str, config: Mapping[str, Any]) -> list[str]:
    pattern = config.get("hybrid_override_pattern")
    names = config.get("layers_block_type") or config.get("layer_types")
    if isinstance(pattern, str) and pattern and set(pattern) <= set(_LETTERS):
        kinds = [_LETTERS[letter] for letter in pattern]
    elif isinstance(names, list) and names:
        kinds = [_NAMES.get(str(kind), str(kind)) for kind in names]
    else:
        raise InputError(
            f"{where}: hybrid_override_pattern={str(pattern)[:60]!r}: must be of M, *, - and E, and"
            " there is no layers_block_type"
        )
    unknown = sorted(set(kinds) - set(_LETTERS.values()))
    if unknown:
        raise InputError(f"{where}: layers_block_type: {unknown[0]!r} is not modelled")
    given = config.get("num_hidden_layers")
    if given is not None and given != len(kinds):
        raise InputError(f"{where}: num_hidden_layers={given!r}: the pattern has {len(kinds)}")
    return kinds


def _mamba(keys: Keys, hidden: int) -> Layer:
    heads, state = keys.size("mamba_num_heads"), keys.size("ssm_state_size")
    inner = heads * keys.size("mamba_head_dim")
    convolved = inner + 2 * keys.size("n_groups") * state
    bias = keys.flag("use_bias")
    matrices = (
        Matrix("mixer.in_proj", hidden, inner + convolved + heads, ATTENTION, bias=bias),
        Matrix("mixer.out_proj", inner, hidden, ATTENTION, bias=bias),
    )
    vectors = hidden + 3 * heads + inner + convolved * keys.size("conv_kernel")
    vectors += convolved if keys.flag("use_conv_bias") else 0
    return Layer(matrices, vectors, LINEAR_STATE, 0)


def _attention(keys: Keys, hidden: int) -> Layer:
    head_dim = keys.size("head_dim")
    width = keys.size("num_attention_heads") * head_dim
    kv_width = keys.size("num_key_value_heads") * head_dim
    matrices = (
        Matrix("mixer.q_proj", hidden, width, ATTENTION),
        Matrix("mixer.k_proj", hidden, kv_width, ATTENTION),
        Matrix("mixer.v_proj", hidden, kv_width, ATTENTION),
        Matrix("mixer.o_proj", width, hidden, ATTENTION),
    )
    return Layer(matrices, hidden, FULL, 2 * kv_width)


def _pair(prefix: str, hidden: int, inner: int, role: str, copies: int, bias: bool) -> list[Matrix]:
    return [
        Matrix(f"{prefix}.up_proj", hidden, inner, role, copies, bias),
        Matrix(f"{prefix}.down_proj", inner, hidden, role, copies, bias),
    ]


def _mlp(keys: Keys, hidden: int) -> Layer:
    inner, bias = keys.size("intermediate_size"), keys.flag("mlp_bias")
    return Layer(tuple(_pair("mixer", hidden, inner, MLP, 1, bias)), hidden, NO_ATTENTION, 0)


def _mixture(keys: Keys, hidden: int) -> Layer:
    count, width = keys.size("n_routed_experts"), keys.size("moe_intermediate_size")
    shared = keys.size("moe_shared_expert_intermediate_size")
    matrices = [
        Matrix("mixer.gate", hidden, count, ROUTER),
        *_pair("mixer.experts", hidden, width, EXPERT, count, False),
        *_pair("mixer.shared_experts", hidden, shared, MLP, 1, keys.flag("mlp_bias")),
    ]
    return Layer(tuple(matrices), hidden, NO_ATTENTION, 0)
