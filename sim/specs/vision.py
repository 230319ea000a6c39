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


def vision_params(
    where: str, model_type: str, config: Mapping[str, Any], hidden_size: int
) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    """Weights of the tower and its projector, notes, and what is not modelled."""
    if model_type != "gemma3":
        return 0, (), ("the vision tower: its weights are not counted",)
    vision = config.get("vision_config")
    note: tuple[str, ...] = ("weights include the vision tower; images are not simulated",)
    if vision is None:
        vision = _SO400M
        note = (*note, "no vision_config: counted as SigLIP So400m, which published Gemma 3 have")
    if not isinstance(vision, dict):
        raise InputError(f"{where}: vision_config: must be an object")
    keys = Keys(f"{where}: vision_config", vision, _SIGLIP_DEFAULTS, {}, nested=True)
    return _siglip(keys) + keys.size("hidden_size") * (hidden_size + 1), note, ()


def _siglip(keys: Keys) -> int:
    """The encoder without its pooling head, which Gemma 3 leaves out."""
    width, inner = keys.size("hidden_size"), keys.size("intermediate_size")
    patch = keys.size("patch_size")
    attention = 4 * (width * width + width)
    mlp = 2 * width * inner + inner + width
    layers = keys.size("num_hidden_layers") * (attention + mlp + 4 * width)
    embedding = width * (keys.size("num_channels") * patch * patch + 1)
    positions = (keys.size("image_size") // patch) ** 2 * width
    return layers + embedding + positions + 2 * width
