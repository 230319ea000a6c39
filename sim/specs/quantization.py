"""Stored sizes of quantised checkpoints, by their `quantization_config`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from engine.core.errors import InputError

# Arithmetic of the matrix products: 16-bit, or on 8-bit tensor cores where the GPU has them.
WIDE, FP8, INT8, FP4 = "16-bit", "fp8", "int8", "fp4"
# Known to exist, and not to be counted: their sizes do not follow from the config alone.
_REFUSED = (
    "aqlm", "bitnet", "eetq", "exl2", "exl3", "gguf", "higgs", "hqq", "quanto", "quark", "quip",
    "spqr", "squeezellm", "torchao", "vptq", "fp_quant", "deepspeedfp", "marlin", "qqq",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantization:
    """One scheme for the matrices of the layers, all but the `skipped` ones.

    `weight_bits` a weight, and for each group of `group_inputs` x `group_outputs` weights (None is
    the whole side) a scale of `scale_bits` and a zero point of `zero_bits`. `arithmetic` is what
    the products are computed in. `kv_dtype` is what the checkpoint asks for the KV cache.
    """

    method: str = "none"
    weight_bits: int = 16
    group_inputs: int | None = None
    group_outputs: int | None = 1
    scale_bits: int = 16
    zero_bits: int = 0
    input_bits: int = 0
    arithmetic: str = WIDE
    skipped: tuple[str, ...] = ()
    experts_only: bool = False
    head: bool = False
    kv_dtype: str | None = None

    def applies(self, name: str, role: str) -> bool:
        """Whether the module of that full name is quantised."""
        if self.method == "none" or role == "router" or (role == "head" and not self.head):
            return False
        if self.experts_only and role != "expert":
            return False
        return not any(_matches(pattern, name) for pattern in self.skipped)

    def matrix_bytes(self, inputs: int, outputs: int) -> int:
        """Memory of one quantised matrix with its scales."""
        groups = -(-inputs // (self.group_inputs or inputs))
        groups *= -(-outputs // (self.group_outputs or outputs))
        bits = groups * (self.scale_bits + self.zero_bits) + inputs * self.input_bits
        return -(-(inputs * outputs * self.weight_bits + bits) // 8)

    def describe(self) -> str:
        """In words."""
        if self.method == "none":
            return "none"
        what = f"{self.method}, {self.weight_bits}-bit weights"
        if self.experts_only:
            what += " of the experts"
        return f"{what}, {self.arithmetic} arithmetic"


UNQUANTIZED = Quantization()


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    pattern = pattern.replace("language_model.model.", "model.").replace("language_model.", "")
    if "*" in pattern:
        return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
    parts, wanted = name.split("."), pattern.strip(".").split(".")
    return any(
        parts[start : start + len(wanted)] == wanted
        for start in range(len(parts) - len(wanted) + 1)
    )


def read_quantization(where: str, config: Mapping[str, Any]) -> Quantization:
    """The scheme of a config's `quantization_config`, or none.

    Raises:
        InputError: a scheme whose stored size is not known; the message names it.
    """
    raw = config.get("quantization_config") or config.get("compression_config")
    if raw is None:
        return UNQUANTIZED
    if not isinstance(raw, dict):
        raise InputError(f"{where}: quantization_config: must be an object")
    method = str(raw.get("quant_method") or raw.get("quant_algo") or "").lower()
    readers = {
        "fp8": _fp8,
        "fbgemm_fp8": _channel_fp8,
        "compressed-tensors": _compressed_tensors,
        "awq": _grouped,
        "gptq": _grouped,
        "awq_marlin": _grouped,
        "gptq_marlin": _grouped,
        "auto-round": _grouped,
        "bitsandbytes": _bitsandbytes,
        "mxfp4": _mxfp4,
        "modelopt": _modelopt,
        "modelopt_fp4": _modelopt,
        "nvfp4": _modelopt,
    }
    if method not in readers:
        known = "is known, but its stored size is not" if method in _REFUSED else "is not known"
        raise InputError(
            f"{where}: quantization_config.quant_method={method!r} {known} modelled; modelled are"
            f" {', '.join(readers)}"
        )
    found = readers[method](where, method, raw)
    for pattern in found.skipped:
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            raise InputError(f"{where}: quantization_config: {pattern!r}: {error}") from None
    return found


def _skips(raw: Mapping[str, Any]) -> tuple[str, ...]:
    for key in ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers",
                "llm_int8_skip_modules"):  # fmt: skip
        names = raw.get(key)
        if isinstance(names, list):
            return tuple(str(name) for name in names)
    return ()


def _whole(where: str, raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{where}: quantization_config.{key}={value!r}: must be an integer")
    return value


def _fp8(where: str, method: str, raw: Mapping[str, Any]) -> Quantization:
    block = raw.get("weight_block_size")
    if block is None:
        return Quantization(
            method, 8, None, None, 32, arithmetic=FP8, skipped=_skips(raw), kv_dtype=None
        )
    rows, columns = _block(where, block, "weight_block_size")
    return Quantization(method, 8, columns, rows, 32, arithmetic=FP8, skipped=_skips(raw))


def _block(where: str, block: object, key: str) -> tuple[int, int]:
    """Rows and columns of the blocks that share a scale."""
    given = block if isinstance(block, list) else []
    sizes = [size for size in given if type(size) is int and size > 0]
    if len(given) != 2 or len(sizes) != 2:
        raise InputError(f"{where}: quantization_config.{key}={block!r}: must be [N, N]")
    return sizes[0], sizes[1]


def _channel_fp8(where: str, method: str, raw: Mapping[str, Any]) -> Quantization:
    return Quantization(method, 8, None, 1, 32, arithmetic=FP8, skipped=_skips(raw))


def _grouped(where: str, method: str, raw: Mapping[str, Any]) -> Quantization:
    """AWQ, GPTQ and auto-round: packed integers, a scale and a zero point a group."""
    bits = _whole(where, raw, "bits" if "bits" in raw else "w_bit", 4)
    if bits not in (2, 3, 4, 8):
        raise InputError(f"{where}: quantization_config.bits={bits}: must be 2, 3, 4 or 8")
    group = _whole(where, raw, "group_size" if "group_size" in raw else "q_group_size", 128)
    if group == 0 or group < -1:
        raise InputError(f"{where}: quantization_config.group_size={group}: must be positive or -1")
    return Quantization(
        method,
        bits,
        None if group == -1 else group,
        1,
        16,
        zero_bits=bits,
        # The order in which GPTQ's activations were sorted.
        input_bits=32 if method.startswith("gptq") else 0,
        skipped=_skips(raw),
        head=bool(raw.get("lm_head")),
    )


def _bitsandbytes(where: str, method: str, raw: Mapping[str, Any]) -> Quantization:
    if raw.get("load_in_8bit"):
        return Quantization(f"{method} int8", 8, None, 1, 32, arithmetic=INT8, skipped=_skips(raw))
    if not raw.get("load_in_4bit"):
        raise InputError(f"{where}: quantization_config: bitsandbytes of neither 4 nor 8 bits")
    # Blocks of 64 weights run over the rows; double quantisation stores their scales in 8 bits.
    scale_bits = 8 if raw.get("bnb_4bit_use_double_quant") else 32
    return Quantization(f"{method} 4 bit", 4, 64, 1, scale_bits, skipped=_skips(raw))


def _mxfp4(where: str, method: str, raw: Mapping[str, Any]) -> Quantization:
    """OCP microscaling: 32 weights share an 8-bit exponent; only experts are stored so."""
    return Quantization(method, 4, 32, 1, 8, experts_only=True, skipped=_skips(raw))


def _modelopt(where: str, method: str, raw: Mapping[str, Any]) -> Quantization:
    nested = raw.get("quantization")
    if isinstance(nested, dict):
        raw = nested
    algorithm = str(raw.get("quant_algo") or "").upper()
    kv = raw.get("kv_cache_quant_algo") or ""
    scheme = raw.get("kv_cache_scheme")
    kv_dtype = "fp8" if str(kv).upper() == "FP8" or _is_8_bit(scheme) else None
    if algorithm == "FP8":
        return Quantization(
            "modelopt FP8", 8, None, None, 32, arithmetic=FP8, skipped=_skips(raw),
            kv_dtype=kv_dtype,
        )  # fmt: skip
    if algorithm == "NVFP4" or (not algorithm and method in ("modelopt_fp4", "nvfp4")):
        return Quantization(
            "modelopt NVFP4", 4, 16, 1, 8, arithmetic=FP4, skipped=_skips(raw), kv_dtype=kv_dtype
        )
    raise InputError(
        f"{where}: quantization_config.quant_algo={algorithm or None!r} of modelopt is not"
        " modelled; modelled are FP8, NVFP4"
    )


def _is_8_bit(scheme: object) -> bool:
    return isinstance(scheme, dict) and scheme.get("num_bits") == 8


def _compressed_tensors(where: str, method: str, raw: Mapping[str, Any]) -> Quantization:
    sparsity = raw.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        raise InputError(
            f"{where}: quantization_config.sparsity_config.format={sparsity.get('format')!r}:"
            " sparse weights are not modelled"
        )
    groups = raw.get("config_groups")
    schemes = [one for one in groups.values()] if isinstance(groups, dict) else []
    if len(schemes) != 1 or not isinstance(schemes[0], dict):
        raise InputError(
            f"{where}: quantization_config.config_groups: {len(schemes)} schemes; one is modelled"
        )
    if schemes[0].get("targets", ["Linear"]) != ["Linear"]:
        raise InputError(
            f"{where}: quantization_config.config_groups targets={schemes[0].get('targets')!r}:"
            " only ['Linear'] is modelled"
        )
    weights = schemes[0].get("weights")
    if not isinstance(weights, dict):
        raise InputError(f"{where}: quantization_config.config_groups: has no weights")
    inputs = schemes[0].get("input_activations")
    kv_dtype = "fp8" if _is_8_bit(raw.get("kv_cache_scheme")) else None
    return _compressed_scheme(where, weights, inputs, _skips(raw), kv_dtype)


def _compressed_scheme(
    where: str, weights: Mapping[str, Any], inputs: object, skips: tuple[str, ...], kv: str | None
) -> Quantization:
    bits = _whole(where, weights, "num_bits")
    strategy = str(weights.get("strategy") or "tensor")
    number = str(weights.get("type", "int"))
    sides: dict[str, tuple[int | None, int | None]] = {
        "tensor": (None, None),
        "channel": (None, 1),
    }
    if strategy in ("group", "tensor_group"):
        size = _whole(where, weights, "group_size")
        if size < 1:
            raise InputError(f"{where}: quantization_config.group_size={size}: must be positive")
        sides[strategy] = (size, 1)
    if strategy == "block":
        rows, columns = _block(where, weights.get("block_structure"), "block_structure")
        sides[strategy] = (columns, rows)
    if strategy not in sides or bits not in (4, 8) or number not in ("int", "float"):
        raise InputError(
            f"{where}: quantization_config: {bits}-bit {number} weights with strategy={strategy!r}"
            " are not modelled"
        )
    arithmetic = WIDE
    if isinstance(inputs, dict):
        narrow = {(8, "float"): FP8, (8, "int"): INT8, (4, "float"): FP4}
        kind = (_whole(where, inputs, "num_bits"), str(inputs.get("type", "int")))
        if kind not in narrow:
            raise InputError(
                f"{where}: quantization_config: activations of {kind} are not modelled"
            )
        arithmetic = narrow[kind]
    symmetric = weights.get("symmetric", True)
    # NVFP4 keeps its scales in 8 bits, all others in 16.
    scale_bits = 8 if (bits, number) == (4, "float") else 16
    group_inputs, group_outputs = sides[strategy]
    return Quantization(
        f"compressed-tensors {number}{bits}",
        bits,
        group_inputs,
        group_outputs,
        scale_bits,
        zero_bits=0 if symmetric else bits,
        arithmetic=arithmetic,
        skipped=skips,
        kv_dtype=kv,
    )
