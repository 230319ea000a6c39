"""The shape of a model, resolved from an HF folder with every default made explicit.

Reads JSON only: it needs neither torch nor transformers, and a key it cannot honour is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.errors import ConfigError
from engine.errors import UnsupportedModel
from engine.layers.fp8_config import Fp8Config, resolve_fp8
from engine.layers.moe_config import MIXTRAL, QWEN2_MOE, QWEN_MOE, MoeConfig, MoeFamily, resolve_moe
from engine.layers.rope_config import RopeConfig, resolve_rope

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Family:
    """What distinguishes one decoder architecture from the others."""

    model_type: str
    qk_norm: bool = False
    qkv_bias: bool | None = None  # None: the config's attention_bias decides
    qkv_bias_key: str | None = None  # a key that may say otherwise
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    default_head_dim: int | None = None
    default_sliding_window: int | None = None
    moe: MoeFamily | None = None


FAMILIES = {
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, mlp_bias=False, default_head_dim=128),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, o_bias=False, mlp_bias=False),
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family(
        "mistral", qkv_bias=False, o_bias=False, mlp_bias=False, default_sliding_window=4096
    ),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", qk_norm=True, mlp_bias=False, moe=QWEN_MOE),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        qkv_bias=True,
        qkv_bias_key="qkv_bias",
        o_bias=False,
        mlp_bias=False,
        moe=QWEN2_MOE,
    ),
    "MixtralForCausalLM": Family(
        "mixtral", qkv_bias=False, o_bias=False, mlp_bias=False, moe=MIXTRAL
    ),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the model code needs to know; no field is optional or means "look elsewhere"."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int  # what the engine can serve, and why no more
    length_limit: str
    rope: RopeConfig
    tie_word_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    moe: MoeConfig | None  # None: every layer is dense
    fp8: Fp8Config | None  # how the checkpoint stores its matrices; None: in 16 or 32 bits
    dtype: str  # the checkpoint's own
    eos_token_ids: tuple[int, ...]  # ascending union of every source
    bos_token_id: int | None


def load_model_config(folder: str | Path) -> ModelConfig:
    """Resolve `folder`/config.json, with EOS ids also from generation config and tokenizer."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError("model", str(folder), "is not a folder")
    raw = _read_json(folder / "config.json", required=True)
    eos = set(_token_ids(raw.get("eos_token_id"), "config.json"))
    generation = _read_json(folder / "generation_config.json")
    eos.update(_token_ids(generation.get("eos_token_id"), "generation_config.json"))
    eos.update(_tokenizer_eos(folder))
    try:
        return resolve_model_config(raw, tuple(sorted(eos)))
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{folder / 'config.json'}: {error}") from None


def resolve_model_config(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Resolve the content of a config.json; raises UnsupportedModel naming the key."""
    architecture = _architecture(raw)
    family = FAMILIES[architecture]
    _refuse_unsupported(raw)
    heads = _size(raw, "num_attention_heads")
    kv_heads = _size(raw, "num_key_value_heads", heads)
    hidden = _size(raw, "hidden_size")
    if heads % kv_heads:
        raise UnsupportedModel(f"num_attention_heads={heads} is no multiple of {kv_heads} KV heads")
    attention_bias = bool(raw.get("attention_bias", False))
    qkv_bias = attention_bias if family.qkv_bias is None else family.qkv_bias
    if family.qkv_bias_key is not None:
        qkv_bias = bool(raw.get(family.qkv_bias_key, qkv_bias))
    num_layers = _size(raw, "num_hidden_layers")
    rope = resolve_rope(raw)
    max_position, length_limit = _max_position(raw, family, rope)
    bos = _token_ids(raw.get("bos_token_id"), "config.json")
    return ModelConfig(
        architecture=architecture,
        model_type=family.model_type,
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(raw, family, hidden, heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=max_position,
        length_limit=length_limit,
        rope=rope,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=family.qk_norm,
        qkv_bias=qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=bool(raw.get("mlp_bias")) if family.mlp_bias is None else family.mlp_bias,
        moe=None if family.moe is None else resolve_moe(raw, family.moe, num_layers),
        fp8=resolve_fp8(raw.get("quantization_config")),
        dtype=_dtype(raw),
        eos_token_ids=eos_token_ids,
        bos_token_id=bos[0] if bos else None,
    )


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return str(name)
    known = ", ".join(FAMILIES)
    raise UnsupportedModel(f"architectures={names!r} is not supported (supported: {known})")


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act={raw['hidden_act']!r} is not supported (only 'silu')")


def _size(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"{key}={value!r} must be a positive integer")
    return value


def _head_dim(raw: Mapping[str, Any], family: Family, hidden: int, heads: int) -> int:
    if "head_dim" not in raw and family.default_head_dim is not None:
        return family.default_head_dim
    if raw.get("head_dim") is None and hidden % heads:
        raise UnsupportedModel(f"hidden_size={hidden} is no multiple of {heads} heads")
    head_dim = _size(raw, "head_dim", hidden // heads)
    if head_dim % 2:
        raise UnsupportedModel(f"head_dim={head_dim} must be even for rotary embeddings")
    return head_dim


def _max_position(raw: Mapping[str, Any], family: Family, rope: RopeConfig) -> tuple[int, str]:
    """How long a sequence may get, and what says so."""
    limit = _size(raw, "max_position_embeddings")
    cause = f"the model's max_position_embeddings is {limit}"
    if rope.rope_type == "yarn":
        # The config may give the positions before or after stretching; the factor counts.
        limit = int(rope.factor * rope.original_max_position)
        cause = (
            f"YaRN stretches the model's {rope.original_max_position} positions by {rope.factor:g}"
            f" to {limit}"
        )
    window = raw.get("sliding_window", family.default_sliding_window)
    # Qwen configs always carry a window but say in a second key whether it is used.
    if family.model_type.startswith("qwen") and not raw.get("use_sliding_window", False):
        window = None
    if window is None or int(window) >= limit:
        return limit, cause
    return int(window), (
        f"the model's sliding_window is {window}, and only within it is full attention, which is"
        " what runs here, the same"
    )


def _dtype(raw: Mapping[str, Any]) -> str:
    """The checkpoint's dtype; both names of the key occur, and HF takes an absent one as fp32."""
    value = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype={value!r} is not supported (supported: {', '.join(DTYPES)})")
    return name


def _token_ids(value: object, where: str) -> list[int]:
    if value is None:
        return []
    ids: list[int] = []
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise UnsupportedModel(f"{where}: token id {item!r} is not a non-negative integer")
        ids.append(item)
    return ids


def _tokenizer_eos(folder: Path) -> list[int]:
    """The tokenizer's EOS id: its name in tokenizer_config.json, its id in tokenizer.json."""
    name = _read_json(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(name, Mapping):
        name = name.get("content")
    if name is None:
        return []
    tokenizer = _read_json(folder / "tokenizer.json")
    for token in tokenizer.get("added_tokens") or []:
        if token.get("content") == name:
            return [int(token["id"])]
    vocab = (tokenizer.get("model") or {}).get("vocab")
    if isinstance(vocab, Mapping) and name in vocab:
        return [int(vocab[name])]
    return []


def _read_json(path: Path, required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise UnsupportedModel(f"{path} does not exist")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UnsupportedModel(f"{path} is not readable JSON: {error}") from None
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path} does not hold a JSON object")
    return content
