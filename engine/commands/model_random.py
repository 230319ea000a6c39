"""Checkpoints with random weights, of any supported shape, for tests of speed and of shapes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.arguments.parser import VerbParser
from engine.arguments.suggest import did_you_mean
from engine.core.errors import ConfigError, InputError
from engine.models.config import resolve_model_config
from engine.models.presets import PRESETS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.layers.weights import WeightSlice

SHARD_BYTES = 2 << 30


def shape_config(like: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The config of a preset, or of a config.json or model folder, with some keys replaced."""
    if like in PRESETS:
        raw = dict(PRESETS[like])
    else:
        path = Path(like)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            known = ", ".join(PRESETS)
            hint = did_you_mean(like, PRESETS)
            raise ConfigError("--like", like, f"is neither a file nor one of: {known}{hint}")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise InputError(f"{path} is not readable JSON: {error}") from None
    raw.update(overrides or {})
    return raw


def write_random_model(
    out: Path,
    raw: Mapping[str, Any],
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
    std: float = 0.02,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config and random weights to the new folder `out`, never holding more than one shard.

    Matrices are normal with deviation `std`, norms ones, biases zero; equal seeds give equal files.
    A `quantization_config` in `raw` is followed.
    """
    import torch

    from engine.attention.torch_backend import TorchAttention
    from engine.distributed.group import TpGroup
    from engine.models.build import build_model
    from engine.models.loader import INDEX_NAME
    from engine.models.output_folder import save_tensors, whole_folder, write_json

    config = resolve_model_config(raw, ())
    # On the meta device the model takes no memory, yet names every tensor and its shape.
    model = build_model(config, TpGroup(), TorchAttention(), torch.float32, "meta", max_position=1)
    slices = {item.name: item for item in model.weight_slices()}
    shapes = {name: item.full_shape for name, item in slices.items()}
    torch_dtype = getattr(torch, dtype)
    with whole_folder(out) as scratch:
        write_json(scratch / "config.json", {**raw, "dtype": dtype, "torch_dtype": dtype})
        shards = list(_split(shapes, torch_dtype.itemsize, shard_bytes))
        weight_map: dict[str, str] = {}
        for i, names in enumerate(shards):
            file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            tensors = {name: _random(slices[name], seed, std, torch_dtype) for name in names}
            save_tensors(tensors, scratch / file)
            weight_map.update(dict.fromkeys(names, file))
        write_json(scratch / INDEX_NAME, {"metadata": {}, "weight_map": weight_map})


def _split(
    shapes: Mapping[str, tuple[int, ...]], itemsize: int, shard_bytes: int
) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        num_bytes = math.prod(shape) * itemsize
        if names and size + num_bytes > shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += num_bytes
    yield names


def _random(item: WeightSlice, seed: int, std: float, dtype: torch.dtype) -> Tensor:
    import torch

    from engine.layers.fp8 import FP8, FP8_MAX
    from engine.layers.weights import Fp8Slice
    from engine.models.loader import DUMMY_FP8_STD, tensor_seed, weight_kind

    name, shape = item.name, item.full_shape
    if item.is_scale:
        return torch.full(shape, std / DUMMY_FP8_STD)
    kind = weight_kind(name)
    if kind == "norm":
        return torch.ones(shape, dtype=dtype)
    if kind == "bias":
        return torch.zeros(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(tensor_seed(seed, name))
    if isinstance(item, Fp8Slice):
        values = torch.empty(shape).normal_(0.0, DUMMY_FP8_STD, generator=generator)
        return values.clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    return torch.empty(shape).normal_(0.0, std, generator=generator).to(dtype)


def _override(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError("set", text, "must be KEY=VALUE")
    try:
        return key, json.loads(value)
    except (json.JSONDecodeError, RecursionError):
        return key, value


def main(argv: Sequence[str]) -> int:
    """The verb `lockstep model random`."""
    parser = VerbParser("model random", __doc__)
    known = ", ".join(PRESETS)
    parser.option("like", required=True, detail=f"a folder, a config.json, or one of {known}")
    parser.option("out", required=True, detail="a new folder")
    parser.option("seed", 0)
    parser.option("dtype", "bfloat16", detail="auto is bfloat16")
    parser.option("std", 0.02)
    parser.option("set")
    options = parser.parse(argv)
    raw = shape_config(options.like, dict(map(_override, options.set)))
    dtype = "bfloat16" if options.dtype == "auto" else options.dtype
    write_random_model(options.out, raw, seed=options.seed, dtype=dtype, std=options.std)
    print(f"wrote {options.out}", file=sys.stderr)
    return 0
