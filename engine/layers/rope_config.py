"""RoPE parameters, resolved from either form that HF configs use; knows no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import UnsupportedModel

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Every number that the angles depend on; fields of other types than `rope_type` are unused."""

    rope_type: str = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


def resolve_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Rope parameters of an HF config; raises UnsupportedModel on any type not implemented."""
    params = dict(raw.get("rope_scaling") or {})
    params.update(raw.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in params.values()):
        raise UnsupportedModel("rope parameters that differ per layer type are not supported")
    # Both keys occur in the wild, "type" being the older one.
    given = params.get("rope_type", params.get("type"))
    scaling = sorted(set(params) - {"rope_theta", "partial_rotary_factor", "rope_type", "type"})
    if given is None and scaling:
        raise UnsupportedModel(f"rope_scaling has {', '.join(scaling)} but no rope_type")
    rope_type = "default" if given is None else str(given)
    if rope_type not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        raise UnsupportedModel(f"rope type {rope_type!r} is not supported (supported: {known})")
    partial = params.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor={partial!r} is not supported (only 1.0)")
    theta = params.get("rope_theta", raw.get("rope_theta"))
    theta = DEFAULT_THETA if theta is None else _number("rope_theta", theta)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    return _scaled(rope_type, theta, params, raw)


def _scaled(
    rope_type: str, theta: float, params: Mapping[str, Any], raw: Mapping[str, Any]
) -> RopeConfig:
    max_position = int(raw["max_position_embeddings"])
    original = raw.get(
        "original_max_position_embeddings",
        params.get("original_max_position_embeddings", max_position),
    )
    required = {"llama3": ("low_freq_factor", "high_freq_factor", "factor"), "linear": ("factor",)}
    for key in required.get(rope_type, ()):
        if params.get(key) is None:
            raise UnsupportedModel(f"rope type {rope_type!r} needs the parameter {key!r}")
    factor = params.get("factor")
    if factor is None:
        factor = max_position / int(original)
    optional = ("attention_factor", "mscale", "mscale_all_dim")
    return RopeConfig(
        rope_type=rope_type,
        theta=theta,
        factor=_number("factor", factor),
        original_max_position=int(original),
        low_freq_factor=_number("low_freq_factor", params.get("low_freq_factor", 1.0)),
        high_freq_factor=_number("high_freq_factor", params.get("high_freq_factor", 4.0)),
        # HF reads a null or zero beta as "not given".
        beta_fast=_number("beta_fast", params.get("beta_fast") or 32.0),
        beta_slow=_number("beta_slow", params.get("beta_slow") or 1.0),
        truncate=bool(params.get("truncate", True)),
        **{key: None if params.get(key) is None else float(params[key]) for key in optional},
    )


def _number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise UnsupportedModel(f"rope parameter {key}={value!r} must be a positive number")
    return float(value)
