"""From a config.json to an architecture: which family, which dtype, which quantisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from engine.core.errors import InputError
from sim.specs.architecture import Architecture
from sim.specs.config_keys import Keys, load_config
from sim.specs.decoder import build_decoder
from sim.specs.families import FAMILIES, VISION_TEXTS
from sim.specs.hybrid import read_nemotron_h
from sim.specs.quantization import read_quantization
from sim.specs.unmodelled import REFUSED, unmodelled
from sim.specs.vision import VISION_TYPES, vision_params

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Config keys that count experts: a family without experts must have none of them.
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TEXTS = {**FAMILIES, **VISION_TEXTS}
KNOWN_TYPES = (*FAMILIES, "nemotron_h", *VISION_TYPES)


def read_architecture(path: Path) -> Architecture:
    """The architecture in a Hugging Face `config.json`, of a `model_type` of the allow-list.

    Raises:
        InputError: unreadable, a key with an impossible value, or what is not modelled; by name.
    """
    config = load_config(path)
    name = str(config.get("_name_or_path") or path.parent.name or path.name)
    return architecture_of(str(path), name, config, path.parent)


def architecture_of(
    where: str, name: str, config: Mapping[str, Any], folder: Path | None = None
) -> Architecture:
    """The same of a config that was read already; `folder` may hold files beside it."""
    model_type = _model_type(where, config)
    built = _read(where, name, model_type, config)
    text = config.get("text_config")
    inner: Mapping[str, Any] = text if isinstance(text, dict) else {}
    stored = _stored_dtype(where, config, inner)
    quantized = config if _is_quantized(config) else inner
    quantized = _with_hf_quant_config(quantized, folder)
    built = replace(
        built, stored_dtype=stored, quantization=read_quantization(where, quantized),
        positions=_positions(built.positions, inner or config),
    )  # fmt: skip
    return replace(built, not_modelled=(*built.not_modelled, *unmodelled(built)))


def _is_quantized(config: Mapping[str, Any]) -> bool:
    return bool(config.get("quantization_config") or config.get("compression_config"))


def _with_hf_quant_config(config: Mapping[str, Any], folder: Path | None) -> Mapping[str, Any]:
    """ModelOpt keeps its scheme in a file of its own beside the config."""
    path = folder / "hf_quant_config.json" if folder is not None else None
    if _is_quantized(config) or path is None or not path.is_file():
        return config
    return {**config, "quantization_config": {"quant_method": "modelopt", **load_config(path)}}


def _model_type(where: str, config: Mapping[str, Any]) -> str:
    value = config.get("model_type")
    if value is None:
        named = config.get("architectures")
        raise InputError(
            f"{where}: model_type is missing (architectures={str(named)[:80]}), so its layers are"
            " not known"
        )
    if not isinstance(value, str):
        raise InputError(f"{where}: model_type={value!r}: must be a name")
    if value in REFUSED:
        raise InputError(f"{where}: model_type={value!r}: {REFUSED[value]}")
    if value not in KNOWN_TYPES:
        near = get_close_matches(value, KNOWN_TYPES, 3, 0.6)
        hint = f"; near it are {', '.join(near)}" if near else ""
        raise InputError(
            f"{where}: model_type={value!r}: its layers are not known, so nothing about it is"
            f" modelled{hint}; known are {', '.join(sorted(KNOWN_TYPES))}"
        )
    return value


def _read(where: str, name: str, model_type: str, config: Mapping[str, Any]) -> Architecture:
    if model_type in VISION_TYPES:
        return _read_vision(where, name, model_type, config)
    if model_type == "nemotron_h":
        return read_nemotron_h(where, name, config)
    return _read_text(where, name, model_type, config, nested=False)


def _read_text(
    where: str, name: str, model_type: str, config: Mapping[str, Any], nested: bool
) -> Architecture:
    family = _TEXTS[model_type]
    for key in _EXPERT_COUNTS:
        if family.experts is None and config.get(key):
            raise InputError(
                f"{where}: {key}={config[key]!r} with model_type={model_type!r}, which has no"
                f" experts; mixtures are {', '.join(t for t, f in FAMILIES.items() if f.experts)}"
            )
    _refuse_variants(where, model_type, config)
    keys = Keys(where, config, family.defaults, family.aliases, nested)
    return build_decoder(name, model_type, family, keys)


def _refuse_variants(where: str, model_type: str, config: Mapping[str, Any]) -> None:
    """Settings that change the layers of a known type in a way that is not modelled."""
    variants = {
        "opt": (("word_embed_proj_dim", config.get("hidden_size")), ("do_layer_norm_before", True)),
        "stablelm": (("use_parallel_residual", False),),
    }
    for key, plain in variants.get(model_type, ()):
        if config.get(key, plain) not in (plain, None):
            raise InputError(
                f"{where}: {key}={config[key]!r} with model_type={model_type!r} is not modelled"
            )


def _read_vision(where: str, name: str, model_type: str, config: Mapping[str, Any]) -> Architecture:
    """A language model with a vision tower: its `text_config` is followed."""
    text = config.get("text_config")
    text_type = VISION_TYPES[model_type]
    if isinstance(text, dict):
        text_type = str(text.get("model_type") or text_type)
        nested = True
    else:
        text, nested = config, False  # older configs hold the sizes beside the vision_config
    if text_type in REFUSED or text_type not in _TEXTS:
        reason = REFUSED.get(text_type, "its layers are not known")
        raise InputError(f"{where}: text_config.model_type={text_type!r}: {reason}")
    if "tie_word_embeddings" in config and nested:
        text = {**text, "tie_word_embeddings": config["tie_word_embeddings"]}
    built = _read_text(f"{where}: text_config", name, text_type, text, nested)
    params, note, gap = vision_params(where, model_type, config, built.hidden_size)
    return replace(
        built,
        model_type=model_type,
        other_params=built.other_params + params,
        notes=(*built.notes, *note),
        not_modelled=(*built.not_modelled, *gap),
    )


def _stored_dtype(where: str, config: Mapping[str, Any], inner: Mapping[str, Any]) -> str:
    for source in (config, inner):
        for key in ("torch_dtype", "dtype"):
            value = source.get(key)
            if value is None:
                continue
            name = str(value).removeprefix("torch.")
            if name not in DTYPE_BYTES:
                names = ", ".join(DTYPE_BYTES)
                raise InputError(f"{where}: {key}={value!r}: must be one of {names}")
            return name
    # vLLM and Transformers take a checkpoint that does not say for float32.
    return "float32"


def _positions(kind: str, config: Mapping[str, Any]) -> str:
    if kind != "rope":
        return kind
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, dict):
        return "rope"
    rope_type = scaling.get("rope_type") or scaling.get("type")
    if not rope_type or rope_type == "default":
        return "rope"
    factor = scaling.get("factor")
    return f"rope, {rope_type}" + (f" x {factor:g}" if isinstance(factor, int | float) else "")
