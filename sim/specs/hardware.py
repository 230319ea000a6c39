"""Data sheets of accelerators: the physical limits that no simulated step may beat."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import yaml

from engine.core.errors import ConfigError, InputError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator.

    `flops_per_s` is dense bf16 with fp32 accumulation, `memory_bytes` what the driver reports,
    `link_bytes_per_s` one direction between two accelerators of a host. `fp8_speedup` and
    `int8_speedup` say how much faster dense 8-bit products are; 1 where there are no such units, so
    that weights are widened before they are used.
    """

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int
    link_bytes_per_s: float
    source: str
    fp8_speedup: float = 1.0
    int8_speedup: float = 1.0

    def speedup(self, arithmetic: str) -> float:
        """How much faster than in 16 bit products are in that arithmetic."""
        return {"fp8": self.fp8_speedup, "int8": self.int8_speedup}.get(arithmetic, 1.0)


def _sheet(
    name: str, tflops: float, gb_per_s: float, mib: int, link_gb_per_s: float, source: str,
    fp8: float = 2.0, int8: float = 2.0,
) -> Hardware:  # fmt: skip
    return Hardware(
        name, tflops * 1e12, gb_per_s * 1e9, mib * MIB, link_gb_per_s * 1e9, source, fp8, int8
    )


_PCIE4, _PCIE5 = 32.0, 64.0

HARDWARE: dict[str, Hardware] = {
    sheet.name: sheet
    for sheet in (
        _sheet("b200", 2250, 8000, 183359, 900, "NVIDIA DGX B200 data sheet, per GPU"),
        _sheet("h200", 989.4, 4800, 143771, 450, "NVIDIA H200 data sheet, SXM"),
        _sheet("h100", 989.4, 3350, 81559, 450, "NVIDIA H100 data sheet, SXM5"),
        _sheet("h100-pcie", 756, 2000, 81559, _PCIE5, "NVIDIA H100 data sheet, PCIe"),
        _sheet("a100-80gb", 312, 2039, 81920, 300, "NVIDIA A100 data sheet, 80 GB SXM", fp8=1.0),
        _sheet("a100-40gb", 312, 1555, 40960, 300, "NVIDIA A100 data sheet, 40 GB SXM", fp8=1.0),
        _sheet("l40s", 362, 864, 46068, _PCIE4, "NVIDIA L40S data sheet, without sparsity"),
        _sheet("l4", 121, 300, 23034, _PCIE4, "NVIDIA L4 data sheet, without sparsity"),
        _sheet("a10", 125, 600, 23028, _PCIE4, "NVIDIA A10 data sheet", fp8=1.0),
        _sheet(
            "rtx4090",
            165.2,
            1008,
            24564,
            _PCIE4,
            "NVIDIA Ada GPU architecture paper, appendix A",
            int8=4.0,
        ),
        _sheet(
            "rtx5090",
            209.5,
            1792,
            32607,
            _PCIE5,
            "NVIDIA RTX Blackwell architecture paper",
            int8=4.0,
        ),
        _sheet(
            "rtxpro6000", 503.8, 1792, 97887, _PCIE5, "NVIDIA RTX PRO Blackwell architecture paper"
        ),
    )
}

_ALIASES = {
    "a100": "a100-80gb",
    "a100-80g": "a100-80gb",
    "a100-40g": "a100-40gb",
    "a100-sxm4": "a100-80gb",
    "a100-sxm4-80gb": "a100-80gb",
    "a100-sxm4-40gb": "a100-40gb",
    "a100-sxm": "a100-80gb",
    "b200-sxm": "b200",
    "h100-sxm": "h100",
    "h100-sxm5": "h100",
    "h100-80g": "h100",
    "h100-80gb": "h100",
    "h100-80gb-hbm3": "h100",
    "h100-sxm5-80gb": "h100",
    "h100-pcie-80gb": "h100-pcie",
    "h200-sxm": "h200",
    "h200-141gb": "h200",
    "h200-sxm-141gb": "h200",
    "l40s-48gb": "l40s",
    "l4-24gb": "l4",
    "a10-24gb": "a10",
    "rtx-4090": "rtx4090",
    "4090": "rtx4090",
    "rtx-5090": "rtx5090",
    "5090": "rtx5090",
    "rtx-pro-6000": "rtxpro6000",
    "rtx-pro-6000-blackwell": "rtxpro6000",
}
# What a file about an accelerator holds: the factor to the sheet's own unit, by key.
_FILE_KEYS = {
    "bf16_tflops": 1e12,
    "memory_gb_per_s": 1e9,
    "memory_mib": MIB,
    "link_gb_per_s": 1e9,
    "fp8_tflops": 1e12,
    "int8_tops": 1e12,
}
_FILE_OPTIONAL = ("fp8_tflops", "int8_tops")


def hardware_named(name: str) -> Hardware:
    """The data sheet of a name in any usual spelling, or of a JSON or YAML file.

    Raises:
        ConfigError: no such sheet.
        InputError: the file is not a data sheet.
    """
    key = re.sub(r"[ _]+", "-", name.strip().lower())
    for prefix in ("nvidia-", "tesla-", "geforce-"):
        key = key.removeprefix(prefix)
    sheet = HARDWARE.get(_ALIASES.get(key, key))
    if sheet is not None:
        return sheet
    path = Path(name)
    if path.suffix.lower() in (".json", ".yaml", ".yml"):
        return read_hardware(path)
    near = get_close_matches(key, [*HARDWARE, *_ALIASES], 1, 0.6)
    hint = f"; did you mean {_ALIASES.get(near[0], near[0])}?" if near else ""
    names = ", ".join(HARDWARE)
    raise ConfigError("hardware", name, f"must be one of {names}, or a .json or .yaml sheet{hint}")


def read_hardware(path: Path) -> Hardware:
    """The data sheet in a file of `name`, `source` and the keys of `_FILE_KEYS`.

    Raises:
        InputError: unreadable, a key is missing, unknown, or no positive number.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text") from None
    except (yaml.YAMLError, RecursionError):
        raise InputError(f"{path}: is neither JSON nor YAML") from None
    if not isinstance(document, dict):
        raise InputError(f"{path}: must hold an object with {', '.join(('name', *_FILE_KEYS))}")
    unknown = [str(key) for key in document if key not in (*_FILE_KEYS, "name", "source")]
    if unknown:
        known = ", ".join(("name", "source", *_FILE_KEYS))
        raise InputError(f"{path}: {unknown[0]!r} is not one of {known}")
    name = document.get("name")
    if not isinstance(name, str) or not name or name.lower() in HARDWARE:
        raise InputError(f"{path}: name={name!r}: must be a name that no built-in sheet has")
    values = {key: _number(path, document, key) for key in _FILE_KEYS}
    flops = values["bf16_tflops"]
    return Hardware(
        name,
        flops,
        values["memory_gb_per_s"],
        int(values["memory_mib"]),
        values["link_gb_per_s"],
        str(document.get("source") or path.name),
        max(1.0, values["fp8_tflops"] / flops),
        max(1.0, values["int8_tops"] / flops),
    )


def _number(path: Path, document: Mapping[object, object], key: str) -> float:
    value = document.get(key)
    if value is None and key in _FILE_OPTIONAL:
        return 0.0
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if not plain or not math.isfinite(float(str(value))) or float(str(value)) <= 0:
        raise InputError(f"{path}: {key}={value!r}: must be a positive number")
    return float(str(value)) * _FILE_KEYS[key]
