"""Rotary position embeddings: angles per scaling type, and their application to heads."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.layers.rope_config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] in float32 and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = 1.0 / (config.theta**exponents)
    if config.rope_type == "linear":
        return base / config.factor, 1.0
    if config.rope_type == "llama3":
        return _llama3(config, base), 1.0
    if config.rope_type == "yarn":
        return _yarn(config, base, head_dim), _yarn_attention_factor(config)
    assert config.rope_type == "default", config.rope_type
    return base, 1.0


def _llama3(config: RopeConfig, base: Tensor) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    turns = config.original_max_position * base / (2 * math.pi)
    span = config.high_freq_factor - config.low_freq_factor
    keep = ((turns - config.low_freq_factor) / span).clamp(0, 1)
    return (1 - keep) * base / config.factor + keep * base


def _yarn(config: RopeConfig, base: Tensor, head_dim: int) -> Tensor:
    """Dimensions below `low` are kept, those above `high` interpolated, with a ramp between."""

    def dimension_of(turns: float) -> float:
        wavelength_ratio = config.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength_ratio) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return base / config.factor * ramp + base * (1 - ramp)


def _yarn_attention_factor(config: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)


def cos_sin_table(
    config: RopeConfig, head_dim: int, max_position: int, device: torch.device
) -> Tensor:
    """Float32 [max_position, head_dim]: cosines in the first half of a row, sines in the second."""
    inverse, factor = inverse_frequencies(config, head_dim)
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * inverse[None, :]
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * factor).to(device)


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate heads x [T, H, D] by rows cos_sin [T, D]; float32 inside, result in x's dtype."""
    cos, sin = (part[:, None, :] for part in cos_sin.chunk(2, dim=-1))
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
