"""Vision towers beside a language model: counted where their sizes are given, else named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.core.errors import InputError
from sim.specs.config_keys import Keys

# Models with a text_config, and the model_type of their language model.
VISION_TYPES = {
    "gemma3": "gemma3_text",
    "internvl": "qwen2",
    "llava": "llama",
    "llava_next": "llama",
    "mistral3": "mistral",
    "pixtral": "mistral",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
# What every published Gemma 3 with vision has.
_SO400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 896,
    "patch_size": 14,
}
_SIGLIP_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
}


# Defaults of the classes of vision configs, as far as their sizes are read.
_QWEN = {"depth": 32, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2,
         "in_channels": 3}  # fmt: skip
_DEFAULTS: dict[str, Mapping[str, Any]] = {
    "gemma3": _SIGLIP_DEFAULTS,
    "qwen2_vl": {**_QWEN, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4},
    "qwen2_5_vl": {
        **_QWEN, "hidden_size": 3584, "intermediate_size": 3420, "out_hidden_size": 3584,
    },
    "qwen3_vl": {
        **_QWEN, "depth": 27, "patch_size": 16, "hidden_size": 1152, "intermediate_size": 4304,
        "out_hidden_size": 3584, "num_position_embeddings": 2304,
    },
    "mistral3": {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_channels": 3, "patch_size": 16,
    },
}  # fmt: skip
_DEFAULTS["qwen3_vl_moe"] = _DEFAULTS["qwen3_vl"]
_NOTE = "weights include the vision tower; images are not simulated"


def vision_params(
    where: str, model_type: str, config: Mapping[str, Any], hidden_size: int
) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    """Weights of the tower and its projector, notes, and what is not modelled."""
    vision = config.get("vision_config")
    if model_type not in _DEFAULTS or (vision is None and model_type != "gemma3"):
        return 0, (), ("the vision tower: its weights are not counted",)
    notes: tuple[str, ...] = (_NOTE,)
    if vision is None:
        vision = _SO400M
        notes += ("no vision_config: counted as SigLIP So400m, which published Gemma 3 have",)
    if not isinstance(vision, dict):
        raise InputError(f"{where}: vision_config: must be an object")
    aliases = {"in_channels": "in_chans"} if "in_chans" in vision else {}
    keys = Keys(f"{where}: vision_config", vision, _DEFAULTS[model_type], aliases, nested=True)
    if model_type == "gemma3":
        return _siglip(keys) + keys.size("hidden_size") * (hidden_size + 1), notes, ()
    if model_type == "mistral3":
        return _pixtral(keys, config, hidden_size), notes, ()
    return _TOWERS[model_type](keys), notes, ()


def _siglip(keys: Keys) -> int:
    """The encoder without its pooling head, which Gemma 3 leaves out."""
    width, inner = keys.size("hidden_size"), keys.size("intermediate_size")
    patch = keys.size("patch_size")
    layers = keys.size("num_hidden_layers") * _block(width, inner)
    embedding = width * (keys.size("num_channels") * patch * patch + 1)
    positions = (keys.size("image_size") // patch) ** 2 * width
    return layers + embedding + positions + 2 * width


def _block(width: int, inner: int) -> int:
    """Attention and an ungated MLP with biases, and two layer norms."""
    return 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width


def _patches(keys: Keys, width: int) -> int:
    size = keys.size("in_channels") * keys.size("temporal_patch_size")
    return width * size * keys.size("patch_size") ** 2


def _merger(keys: Keys, width: int, outputs: int) -> int:
    """Two linear layers over the patches that become one token."""
    merged = width * keys.size("spatial_merge_size") ** 2
    return merged * (merged + 1) + outputs * (merged + 1)


def _qwen2(keys: Keys) -> int:
    width, outputs = keys.size("embed_dim"), keys.size("hidden_size")
    layers = keys.size("depth") * _block(width, width * keys.size("mlp_ratio"))
    return _patches(keys, width) + layers + 2 * width + _merger(keys, width, outputs)


def _qwen2_5(keys: Keys) -> int:
    width, inner = keys.size("hidden_size"), keys.size("intermediate_size")
    layer = 4 * (width * width + width) + 3 * width * inner + 2 * inner + width + 2 * width
    merger = width + _merger(keys, width, keys.size("out_hidden_size"))
    return _patches(keys, width) + keys.size("depth") * layer + merger


def _qwen3(keys: Keys) -> int:
    width, outputs = keys.size("hidden_size"), keys.size("out_hidden_size")
    layers = keys.size("depth") * _block(width, keys.size("intermediate_size"))
    positions = keys.size("num_position_embeddings") * width
    deep = keys.get("deepstack_visual_indexes")
    num_deep = len(deep) if isinstance(deep, list) else 3
    merger = _merger(keys, width, outputs)
    merged = width * keys.size("spatial_merge_size") ** 2
    mergers = 2 * width + merger + num_deep * (2 * merged + merger)
    return _patches(keys, width) + width + layers + positions + mergers


_TOWERS = {
    "qwen2_vl": _qwen2, "qwen2_5_vl": _qwen2_5, "qwen3_vl": _qwen3, "qwen3_vl_moe": _qwen3,
}  # fmt: skip


def _pixtral(keys: Keys, config: Mapping[str, Any], hidden_size: int) -> int:
    width, inner = keys.size("hidden_size"), keys.size("intermediate_size")
    layer = 4 * width * width + 3 * width * inner + 2 * width
    tower = keys.size("num_hidden_layers") * layer + width
    tower += width * keys.size("num_channels") * keys.size("patch_size") ** 2
    merge = Keys(keys.where, config, {"spatial_merge_size": 2}, {}).size("spatial_merge_size") ** 2
    bias = 2 * hidden_size if config.get("multimodal_projector_bias") else 0
    projector = width + merge * width * width + hidden_size * (width + hidden_size) + bias
    return tower + projector
