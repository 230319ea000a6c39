"""How matrices are stored in 8-bit floats (e4m3), resolved from an HF config; knows no tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.core.errors import ConfigError
from engine.errors import UnsupportedModel
from engine.layers.sharding import Shard

QUANTIZATIONS = ("fp8",)
_SUPPORTED = "supported: fp8, and compressed-tensors of 8-bit floats"
_MAX_BLOCK = 128
_LEAST_COLUMNS_ON_GPU = 32


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """One scale per output row, or per block of rows and columns, in float32.

    Activations get theirs while computing, per token or per token and block of columns. A scale
    per tensor is spread over its rows; static scales of activations are accounted for and checked,
    but not used, since a token's own is finer.
    """

    is_stored: bool  # False: the checkpoint holds 16-bit matrices, quantised while loading
    block: tuple[int, int] | None = None
    scale_name: str = "weight_scale"
    has_tensor_scales: bool = False
    has_input_scales: bool = False
    has_fp8_kv: bool = False  # the checkpoint is made for a KV cache of 8-bit floats
    kept: tuple[str, ...] = ()  # modules that stay in 16 bits: names, prefixes or re: patterns

    @property
    def group(self) -> int | None:
        """Columns that share a scale of an activation; None: all."""
        return None if self.block is None else self.block[1]

    def covers(self, module: str) -> bool:
        """Whether the matrix of this module is quantised."""
        return not any(_is_named(module, name) for name in self.kept)


ON_LOAD = Fp8Config(is_stored=False)


def fp8_for(config: Fp8Config | None, modules: list[str]) -> Fp8Config | None:
    """The configuration of matrices that are one here; None if they stay in 16 bits.

    Raises:
        UnsupportedModel: some of them are quantised and others not.
    """
    if config is None:
        return None
    covered = {config.covers(module) for module in modules}
    if len(covered) == 2:
        raise UnsupportedModel(f"{', '.join(modules)}: some are quantised and others are not")
    return config if covered == {True} else None


def check_blocks(fp8: Fp8Config | None, name: str, rows: Shard, columns: Shard) -> None:
    """Raise if a rank's part of a matrix does not begin and end with blocks."""
    if fp8 is None or fp8.block is None:
        return
    for what, shard, size in (("rows", rows, fp8.block[0]), ("columns", columns, fp8.block[1])):
        if shard.full % size:
            raise UnsupportedModel(
                f"weight_block_size={list(fp8.block)} does not divide the {shard.full} {what} of "
                f"{name}"
            )
        if shard.size % size:
            raise ConfigError(
                "tensor_parallel_size",
                shard.full // shard.size,
                f"would cut blocks of {size} {what} of {name}, which has {shard.full}",
            )


def check_on_gpu(fp8: Fp8Config | None) -> None:
    """Raise if a block is narrower than what the matrix units take at a time."""
    if fp8 is not None and fp8.block is not None and fp8.block[1] < _LEAST_COLUMNS_ON_GPU:
        raise UnsupportedModel(
            f"quantization_config: weight_block_size={list(fp8.block)}: on a GPU a block has at "
            f"least {_LEAST_COLUMNS_ON_GPU} columns"
        )


def resolve_fp8(raw: Mapping[str, Any] | None) -> Fp8Config | None:
    """The meaning of `quantization_config`; raises UnsupportedModel naming what is not read."""
    if not raw:
        return None
    method = str(raw.get("quant_method", "none"))
    if method == "fp8":
        return _native(raw)
    if method == "compressed-tensors":
        return _compressed_tensors(raw)
    detail = raw.get("quant_algo") or (raw.get("quantization") or {}).get("quant_algo")
    shown = f"{method} ({detail})" if detail else method
    raise UnsupportedModel(f"quantization_config: method {shown} is not supported ({_SUPPORTED})")


def _native(raw: Mapping[str, Any]) -> Fp8Config:
    """The form of Qwen3-8B-FP8 and of AutoFP8."""
    form = raw.get("fmt", "e4m3")
    if form != "e4m3":
        raise UnsupportedModel(f"quantization_config: fmt={form!r} is not supported (only 'e4m3')")
    scheme = raw.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise UnsupportedModel(f"quantization_config: activation_scheme={scheme!r} is unknown")
    kept = tuple(raw.get("modules_to_not_convert") or raw.get("ignored_layers") or ())
    size = raw.get("weight_block_size")
    if size is None:
        return Fp8Config(
            True, has_tensor_scales=True, has_input_scales=scheme == "static", kept=kept
        )
    if scheme == "static":
        raise UnsupportedModel("quantization_config: blocks with static activations are unknown")
    return Fp8Config(True, block=_block(size), scale_name="weight_scale_inv", kept=kept)


def _compressed_tensors(raw: Mapping[str, Any]) -> Fp8Config:
    groups = raw.get("config_groups") or {}
    if len(groups) != 1:
        raise UnsupportedModel(
            f"quantization_config: {len(groups)} config_groups, only one is supported"
        )
    (group,) = groups.values()
    if list(group.get("targets") or ()) != ["Linear"]:
        raise UnsupportedModel(
            f"quantization_config: targets={group.get('targets')!r}, only ['Linear'] is supported"
        )
    weights = group.get("weights") or {}
    activations = group.get("input_activations") or {}
    for what, part in (("weights", weights), ("input_activations", activations)):
        kind, bits = part.get("type"), part.get("num_bits")
        if kind != "float" or bits != 8 or not part.get("symmetric", True):
            form = raw.get("format", "compressed-tensors")
            raise UnsupportedModel(
                f"quantization_config: {form} with {what} of type {kind!r} and {bits} bits is not "
                f"supported ({_SUPPORTED})"
            )
    strategy = weights.get("strategy")
    if strategy not in ("channel", "tensor", "block"):
        raise UnsupportedModel(f"quantization_config: weights of strategy {strategy!r}")
    return Fp8Config(
        True,
        block=_block(weights.get("block_structure")) if strategy == "block" else None,
        has_tensor_scales=strategy == "tensor",
        has_input_scales=not activations.get("dynamic", False),
        has_fp8_kv=_asks_for_fp8_kv(raw.get("kv_cache_scheme")),
        kept=tuple(raw.get("ignore") or ()),
    )


def _asks_for_fp8_kv(scheme: Mapping[str, Any] | None) -> bool:
    if not scheme:
        return False
    if scheme.get("type") != "float" or scheme.get("num_bits") != 8:
        kind, bits = scheme.get("type"), scheme.get("num_bits")
        raise UnsupportedModel(
            f"quantization_config: kv_cache_scheme of type {kind!r} and {bits} bits is unsupported"
        )
    return True


def _block(size: object) -> tuple[int, int]:
    """Rows and columns of a block: powers of two, as the kernels need them."""
    if isinstance(size, list | tuple) and len(size) == 2:
        rows, columns = size
        if all(isinstance(n, int) and 16 <= n <= _MAX_BLOCK and n & (n - 1) == 0 for n in size):
            return int(rows), int(columns)
    raise UnsupportedModel(
        f"quantization_config: weight_block_size={size!r} must be two powers of two from 16 to "
        f"{_MAX_BLOCK}"
    )


def _is_named(module: str, name: str) -> bool:
    if name.startswith("re:"):
        return re.match(name[3:], module) is not None
    return module == name or module.startswith(f"{name}.") or module.endswith(f".{name}")
