"""Which model is it? Digests that do not depend on how a checkpoint is cut into files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from xxhash import xxh3_128

from engine.core.errors import InputError
from engine.models.config import load_model_config

# What describes the checkpoint's form or its service, not what it computes.
_NOT_COMPARED = (
    "dtype",
    "length_limit",
    "max_position_embeddings",
    "eos_token_ids",
    "bos_token_id",
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """A model by what it computes: resolved configuration, weights by layer, tokenizer."""

    config: dict[str, Any]
    weights: dict[str, str]  # digest by layer, and of what lies outside all layers
    tokenizer: str | None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def identity_of(folder: Path) -> ModelIdentity:
    """Reads all of the weights once."""
    return ModelIdentity(_config(folder), _weights(folder), _tokenizer(folder))


def check_same(reference: Mapping[str, Any], mine: ModelIdentity, where: str, folder: Path) -> None:
    """Refuses a model that the reference was not made of, and says in what they differ.

    Raises:
        InputError: they differ.
    """
    for key, wanted in reference["config"].items():
        found = mine.config.get(key)
        if found != wanted:
            _refuse(where, folder, "of another model", f"{key} is {wanted!r} there, {found!r} here")
    for layer, digest in reference["weights"].items():
        if mine.weights.get(layer) != digest:
            _refuse(where, folder, "of another revision", f"the weights of {layer} differ")
    theirs = reference["tokenizer"]
    if theirs is not None and mine.tokenizer is not None and theirs != mine.tokenizer:
        _refuse(where, folder, "of another tokenizer", "their files differ")


def _refuse(where: str, folder: Path, what: str, detail: str) -> None:
    raise InputError(
        f"{where}: the reference is {what} than {folder.name}: {detail}; make one of this folder "
        "with golden record"
    )


def _config(folder: Path) -> dict[str, Any]:
    resolved = asdict(load_model_config(folder))
    kept = {key: value for key, value in resolved.items() if key not in _NOT_COMPARED}
    plain: dict[str, Any] = json.loads(json.dumps(kept, default=str))
    return plain


def _weights(folder: Path) -> dict[str, str]:
    by_layer: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                tensor = file.get_tensor(name)
                digest = xxh3_128(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
                by_layer.setdefault(_layer_of(name), []).append((name, digest.hexdigest()))
    return {
        layer: xxh3_128(repr(sorted(items)).encode()).hexdigest()
        for layer, items in sorted(by_layer.items())
    }


def _layer_of(name: str) -> str:
    parts = name.split(".")
    if "layers" not in parts:
        return "embedding, norm and head"
    place = parts.index("layers")
    return f"layer {parts[place + 1]}"


def _tokenizer(folder: Path) -> str | None:
    digest, found = xxh3_128(), False
    for name in _TOKENIZER_FILES:
        path = folder / name
        if path.is_file():
            digest.update(name.encode() + path.read_bytes())
            found = True
    return digest.hexdigest() if found else None
