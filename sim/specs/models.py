"""What a user calls a model: built-in names in any spelling, config files, and suggestions."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from engine.core.errors import ConfigError, InputError
from engine.hub.folders import hub_file, is_hub_id
from sim.specs.architecture import Architecture
from sim.specs.builtin import MODELS
from sim.specs.config_keys import load_config
from sim.specs.counted import shape_of
from sim.specs.read_model import DTYPE_BYTES, architecture_of, read_architecture
from sim.specs.shape import ModelShape, MoeShape

DTYPES = ("auto", *DTYPE_BYTES)
KV_DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
_ALIASES = {
    "llama3-8b": "llama-3-8b",
    "llama3-70b": "llama-3-70b",
    "llama3.1-8b": "llama-3.1-8b",
    "llama3.1-70b": "llama-3.1-70b",
    "llama3.2-1b": "llama-3.2-1b",
    "llama3.2-3b": "llama-3.2-3b",
    "llama2-7b": "llama-2-7b",
    "meta-llama-3-8b": "llama-3-8b",
    "meta-llama-3-70b": "llama-3-70b",
    "meta-llama-3.1-8b": "llama-3.1-8b",
    "meta-llama-3.1-70b": "llama-3.1-70b",
    "mistral-7b-v0.3": "mistral-7b",
    "mistral-7b-instruct-v0.3": "mistral-7b",
    "mixtral-8x7b-v0.1": "mixtral-8x7b",
    "mixtral-8x7b-instruct-v0.1": "mixtral-8x7b",
}
# Endings of trainings that change no shape.
_TRAININGS = re.compile(r"-(instruct|chat|chat-hf|hf)$")
__all__ = [
    "DTYPES", "DTYPE_BYTES", "KV_DTYPES", "MODELS", "ModelShape", "MoeShape", "architecture_named",
    "model_named", "served_dtype", "served_kv_dtype",
]  # fmt: skip
# Families of the built-in names, for their exact counts.
_FAMILIES = (
    ("qwen3-30b-a3b", "qwen3_moe"), ("qwen3-235b-a22b", "qwen3_moe"), ("qwen3-", "qwen3"),
    ("qwen2.5-", "qwen2"), ("llama-", "llama"), ("smollm2-", "llama"), ("mistral-", "mistral"),
    ("mixtral-", "mixtral"),
)  # fmt: skip


def model_named(name: str, dtype: str = "auto", kv_cache_dtype: str = "auto") -> ModelShape:
    """The shape of a built-in name, a config.json (or its folder), or a name on the hub.

    `dtype` auto serves 16 bit, whatever the checkpoint is stored in, as vLLM does; the KV cache has
    that dtype, or what the checkpoint asks for.

    Raises:
        ConfigError: no such model, or no such dtype.
        InputError: the file is not the config of a decoder whose costs are modelled.
    """
    if dtype not in DTYPES:
        raise ConfigError("dtype", dtype, f"must be one of {', '.join(DTYPES)}")
    if kv_cache_dtype != "auto" and kv_cache_dtype not in KV_DTYPES:
        known = ", ".join(("auto", *KV_DTYPES))
        raise ConfigError("kv_cache_dtype", kv_cache_dtype, f"must be one of {known}")
    builtin = None if _config_path(name) else builtin_name(name)
    if (
        builtin is not None
        and dtype in ("auto", "bfloat16", "float16")
        and kv_cache_dtype == "auto"
    ):
        return MODELS[builtin]
    built = architecture_named(name)
    if built.not_modelled:
        raise InputError(
            f"{name}: model_type={built.model_type!r}: not modelled by a simulated run:"
            f" {'; '.join(built.not_modelled)}"
        )
    dtype_bytes = DTYPE_BYTES[served_dtype(built, dtype)]
    return shape_of(built, dtype_bytes, KV_DTYPES[served_kv_dtype(built, dtype, kv_cache_dtype)])


def served_dtype(built: Architecture, dtype: str = "auto") -> str:
    """What the weights and activations are served in."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if built.stored_dtype == "float32" else built.stored_dtype


def served_kv_dtype(built: Architecture, dtype: str = "auto", kv_cache_dtype: str = "auto") -> str:
    """What the KV cache is kept in."""
    if kv_cache_dtype != "auto":
        return kv_cache_dtype
    return built.quantization.kv_dtype or served_dtype(built, dtype)


def builtin_name(name: str) -> str | None:
    """The built-in model of a name in any spelling, with or without owner and training; or None."""
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    if key.count("/") == 1:
        key = key.partition("/")[2]
    for candidate in (key, _TRAININGS.sub("", key)):
        candidate = _ALIASES.get(candidate, candidate)
        if candidate in MODELS:
            return candidate
    return None


def architecture_named(name: str) -> Architecture:
    """The exact counts of a built-in name, a config.json or its folder, or a name on the hub.

    Raises:
        ConfigError: no such name or path.
        InputError: the file is not the config of a decoder of the allow-list.
    """
    path = _config_path(name)
    if path is not None:
        return read_architecture(path)
    builtin = builtin_name(name)
    if builtin is not None:
        return _builtin_architecture(MODELS[builtin])
    if is_hub_id(name):
        return _hub_architecture(name)
    raise ConfigError("model", name, _unknown(name))


def _hub_architecture(name: str) -> Architecture:
    """That of a hub id's config.json alone, from the user's cache if it is there."""
    try:
        path = hub_file(name, "config.json")
    except (InputError, ConfigError) as error:
        raise ConfigError("model", name, f"{_unknown(name)} ({error})") from None
    short = name.rpartition("/")[2].partition("@")[0]
    return architecture_of(str(path), short, load_config(path), path.parent)


def _config_path(name: str) -> Path | None:
    """The file that a path names; it comes before a built-in model of the same name."""
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    return path if path.is_file() else None


def _unknown(name: str) -> str:
    if Path(name).is_dir():
        return "is a folder without a config.json"
    key = _TRAININGS.sub("", name.strip().lower().rpartition("/")[2])
    near = get_close_matches(key, [*MODELS, *_ALIASES], 1, 0.6)
    hint = f"; did you mean {_ALIASES.get(near[0], near[0])}?" if near else ""
    return f"must be a path to a config.json or one of {', '.join(MODELS)}{hint}"


def _builtin_architecture(shape: ModelShape) -> Architecture:
    """The architecture of a row of the table, by way of the config that it restates."""
    config: dict[str, object] = {
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied_embeddings,
        "max_position_embeddings": shape.max_position,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "model_type": next(kind for start, kind in _FAMILIES if shape.name.startswith(start)),
    }
    if isinstance(shape, MoeShape):
        config["num_experts"] = config["num_local_experts"] = shape.num_experts
        config["num_experts_per_tok"] = shape.experts_per_token
        config["moe_intermediate_size"] = shape.moe_intermediate_size
    return architecture_of(shape.name, shape.name, config)
