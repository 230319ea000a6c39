"""Builds the layers of a family from the keys of a config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.core.errors import InputError
from sim.specs.architecture import (
    ATTENTION,
    CHUNKED,
    EXPERT,
    FULL,
    LATENT,
    MLP,
    ROUTER,
    SLIDING,
    Architecture,
    Layer,
    Matrix,
)
from sim.specs.config_keys import Keys
from sim.specs.family import Experts, Family

_LAYER_TYPES = {
    "full_attention": FULL,
    "sliding_attention": SLIDING,
    "chunked_attention": CHUNKED,
}


def build_decoder(name: str, model_type: str, family: Family, keys: Keys) -> Architecture:
    """The architecture of one config of a family.

    Raises:
        InputError: a key has an impossible value, or one that is not modelled.
    """
    hidden, num_layers = keys.size("hidden_size"), keys.size("num_hidden_layers")
    num_heads = keys.size("num_attention_heads")
    heads = _heads(family, keys, hidden, num_heads)
    inner = keys.size(family.mlp_inner, 4 * hidden if family.learned_positions == 0 else None)
    attention, kv_values, vectors = _attention(family, keys, hidden, heads)
    norms = family.norms * family.norm_width * hidden + family.extra_layer_params
    if family.sinks:
        norms += num_heads
    mixture, is_mixture = _mixture(family, keys, hidden, num_layers)
    dense = _mlp(family, keys, "mlp", MLP, hidden, inner)
    kinds = _layer_kinds(family, keys, num_layers)
    window = keys.optional("sliding_window") if SLIDING in kinds else None
    layers = tuple(
        Layer(
            (*attention, *(mixture if is_mixture(index) else dense)),
            norms + vectors,
            LATENT if family.latent else kind,
            kv_values,
            window if kind == SLIDING else None,
        )
        for index, kind in enumerate(kinds)
    )
    max_position = keys.size("max_position_embeddings")
    built = Architecture(
        name=name,
        model_type=model_type,
        layers=layers,
        hidden_size=hidden,
        vocab_size=keys.size("vocab_size"),
        num_heads=num_heads,
        num_kv_heads=heads[1],
        head_dim=heads[2],
        intermediate_size=inner,
        max_position=max_position,
        tied_embeddings=bool(keys.get("tie_word_embeddings")),
        stored_dtype="",
        positions=family.positions,
        gated=family.gated,
        head_bias=keys.flag(family.head_bias),
        norm_params=family.norm_width * hidden,
        notes=family.notes,
    )
    if family.learned_positions is not None:
        rows = max_position + family.learned_positions
        built = replace(built, embedding_params=rows * hidden)
    if family.experts is not None and any(layer.params(EXPERT) for layer in layers):
        experts = family.experts
        built = replace(
            built,
            num_experts=keys.size(experts.count),
            experts_per_token=keys.size(experts.per_token),
        )
    return built


def _heads(family: Family, keys: Keys, hidden: int, num_heads: int) -> tuple[int, int, int]:
    """Query heads, KV heads and the size of one."""
    if hidden % num_heads and keys.get("head_dim") is None and not family.latent:
        raise InputError(
            f"{keys.where}: hidden_size={hidden} is not divisible by"
            f" num_attention_heads={num_heads}, and there is no head_dim"
        )
    return (
        num_heads,
        keys.size("num_key_value_heads", num_heads) if family.grouped else num_heads,
        keys.size("head_dim", max(1, hidden // num_heads)),
    )


def _attention(
    family: Family, keys: Keys, hidden: int, heads: tuple[int, int, int]
) -> tuple[tuple[Matrix, ...], int, int]:
    """Matrices, KV values of a token, and the parameters of the norms within the attention."""
    if family.latent:
        return _latent_attention(family, keys, hidden, heads[0])
    num_heads, num_kv_heads, head_dim = heads
    bias, out_bias = keys.flag(family.qkv_bias), keys.flag(family.out_bias)
    width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
    matrices = (
        Matrix("self_attn.q_proj", hidden, width, ATTENTION, bias=bias),
        Matrix("self_attn.k_proj", hidden, kv_width, ATTENTION, bias=bias),
        Matrix("self_attn.v_proj", hidden, kv_width, ATTENTION, bias=bias),
        Matrix("self_attn.o_proj", width, hidden, ATTENTION, bias=out_bias),
    )
    vectors = 0
    if family.qk_norm and keys.flag(family.qk_norm_if):
        spans = {"head": 2 * head_dim, "heads": width + kv_width, "width": width + kv_width}
        vectors = spans[family.qk_norm] * family.qk_norm_width
    return matrices, 2 * kv_width, vectors


def _latent_attention(
    family: Family, keys: Keys, hidden: int, num_heads: int
) -> tuple[tuple[Matrix, ...], int, int]:
    rank, rope, nope = (
        keys.size(key) for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")
    )
    value = keys.size("v_head_dim", hidden // num_heads)
    bias, query_rank = keys.flag(family.qkv_bias), keys.optional("q_lora_rank")
    query = num_heads * (nope + rope)
    if query_rank is None:
        queries = [Matrix("self_attn.q_proj", hidden, query, ATTENTION)]
    else:
        queries = [
            Matrix("self_attn.q_a_proj", hidden, query_rank, ATTENTION, bias=bias),
            Matrix("self_attn.q_b_proj", query_rank, query, ATTENTION),
        ]
    matrices = (
        *queries,
        Matrix("self_attn.kv_a_proj_with_mqa", hidden, rank + rope, ATTENTION, bias=bias),
        Matrix("self_attn.kv_b_proj", rank, num_heads * (nope + value), ATTENTION),
        Matrix("self_attn.o_proj", num_heads * value, hidden, ATTENTION, bias=bias),
    )
    return matrices, rank + rope, rank + (query_rank or 0)


def _mlp(
    family: Family, keys: Keys, prefix: str, role: str, hidden: int, inner: int, copies: int = 1,
    bias: bool | None = None,
) -> tuple[Matrix, ...]:  # fmt: skip
    has_bias = keys.flag(family.mlp_bias) if bias is None else bias
    names = ("gate_proj", "up_proj") if family.gated else ("up_proj",)
    inwards = (Matrix(f"{prefix}.{name}", hidden, inner, role, copies, has_bias) for name in names)
    return (*inwards, Matrix(f"{prefix}.down_proj", inner, hidden, role, copies, has_bias))


def _mixture(
    family: Family, keys: Keys, hidden: int, num_layers: int
) -> tuple[tuple[Matrix, ...], Callable[[int], bool]]:
    """The matrices of a layer with experts, and which layers those are."""
    experts = family.experts
    if experts is None:
        return (), lambda index: False
    if keys.get(experts.count) == 0:
        return (), lambda index: False
    count, width = keys.size(experts.count), keys.size(experts.width)
    per_token = keys.size(experts.per_token)
    if per_token > count:
        name = keys.name(experts.per_token)
        raise InputError(f"{keys.where}: {name}={per_token}: there are {count} experts")
    matrices = [
        Matrix("mlp.gate", hidden, count, ROUTER, bias=experts.router_bias),
        *_mlp(family, keys, "mlp.experts", EXPERT, hidden, width, count, experts.expert_bias),
    ]
    shared = keys.count(experts.shared_width) if experts.shared_width else 0
    if experts.shared_count:
        shared = keys.count(experts.shared_count) * width
    if shared:
        matrices += _mlp(family, keys, "mlp.shared_experts", MLP, hidden, shared)
        if experts.shared_gate:
            matrices.append(Matrix("mlp.shared_expert_gate", hidden, 1, ROUTER))
    return tuple(matrices), _mixture_layers(experts, keys, num_layers)


def _mixture_layers(experts: Experts, keys: Keys, num_layers: int) -> Callable[[int], bool]:
    if experts.layers == "after first":
        first = keys.count("first_k_dense_replace")
        return lambda index: index >= first
    if experts.layers == "sparse step":
        step, plain = keys.size("decoder_sparse_step", 1), set(keys.indices("mlp_only_layers"))
        return lambda index: index not in plain and (index + 1) % step == 0
    if experts.layers == "range":
        start, step = keys.count("moe_layer_start_index"), keys.size("moe_layer_interval", 1)
        last = keys.get("moe_layer_end_index")
        end = last if isinstance(last, int) and last >= 0 else num_layers - 1
        return lambda index: (index + 1) % step == 0 and start <= index <= end
    return lambda index: True


def _layer_kinds(family: Family, keys: Keys, num_layers: int) -> list[str]:
    """What each layer attends to."""
    if not family.window or not keys.flag(family.window_if):
        return [FULL] * num_layers
    if keys.optional("sliding_window") is None:
        return [FULL] * num_layers
    names = keys.names("layer_types", num_layers)
    if names is not None:
        unknown = sorted(set(names) - set(_LAYER_TYPES))
        if unknown:
            raise InputError(f"{keys.where}: layer_types: {unknown[0]!r} is not modelled")
        return [_LAYER_TYPES[name] for name in names]
    if family.window == "late":
        first = keys.count("max_window_layers", num_layers)
        return [SLIDING if index >= first else FULL for index in range(num_layers)]
    if family.window == "pattern":
        every = _window_every(family, keys)
        if every:
            return [FULL if (index + 1) % every == 0 else SLIDING for index in range(num_layers)]
    return [SLIDING] * num_layers


def _window_every(family: Family, keys: Keys) -> int:
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        value = keys.get(key)
        if isinstance(value, str) and value and set(value) <= {"L", "G"}:
            return len(value)
        if value is not None:
            return keys.size(key)
    return family.window_every
