"""Data sheets of accelerators: the physical limits that no simulated step may beat."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator.

    `flops_per_s` is dense bf16 with fp32 accumulation, `memory_bytes` what the driver reports,
    `link_bytes_per_s` one direction between two accelerators of a host.
    """

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int
    link_bytes_per_s: float
    source: str


def _sheet(
    name: str, tflops: float, gb_per_s: float, mib: int, link_gb_per_s: float, source: str
) -> Hardware:
    return Hardware(name, tflops * 1e12, gb_per_s * 1e9, mib * MIB, link_gb_per_s * 1e9, source)


_PCIE4, _PCIE5 = 32.0, 64.0

HARDWARE: dict[str, Hardware] = {
    sheet.name: sheet
    for sheet in (
        _sheet("b200", 2250, 8000, 183359, 900, "NVIDIA DGX B200 data sheet, per GPU"),
        _sheet("h200", 989.4, 4800, 143771, 450, "NVIDIA H200 data sheet, SXM"),
        _sheet("h100", 989.4, 3350, 81559, 450, "NVIDIA H100 data sheet, SXM5"),
        _sheet("h100-pcie", 756, 2000, 81559, _PCIE5, "NVIDIA H100 data sheet, PCIe"),
        _sheet("a100-80gb", 312, 2039, 81920, 300, "NVIDIA A100 data sheet, 80 GB SXM"),
        _sheet("a100-40gb", 312, 1555, 40960, 300, "NVIDIA A100 data sheet, 40 GB SXM"),
        _sheet("l40s", 362, 864, 46068, _PCIE4, "NVIDIA L40S data sheet, without sparsity"),
        _sheet("l4", 121, 300, 23034, _PCIE4, "NVIDIA L4 data sheet, without sparsity"),
        _sheet("a10", 125, 600, 23028, _PCIE4, "NVIDIA A10 data sheet"),
        _sheet(
            "rtx4090", 165.2, 1008, 24564, _PCIE4, "NVIDIA Ada GPU architecture paper, appendix A"
        ),
        _sheet("rtx5090", 209.5, 1792, 32607, _PCIE5, "NVIDIA RTX Blackwell architecture paper"),
        _sheet(
            "rtxpro6000", 503.8, 1792, 97887, _PCIE5, "NVIDIA RTX PRO Blackwell architecture paper"
        ),
    )
}

_ALIASES = {
    "a100": "a100-80gb",
    "a100-80g": "a100-80gb",
    "a100-40g": "a100-40gb",
    "h100-sxm": "h100",
    "h200-sxm": "h200",
    "rtx-4090": "rtx4090",
    "rtx-5090": "rtx5090",
    "rtx-pro-6000": "rtxpro6000",
}


def hardware_named(name: str) -> Hardware:
    """The data sheet of a name or alias.

    Raises:
        ConfigError: no such sheet.
    """
    key = name.lower()
    sheet = HARDWARE.get(_ALIASES.get(key, key))
    if sheet is None:
        raise ConfigError("hardware", name, f"must be one of {', '.join(HARDWARE)}")
    return sheet
