"""What configurations an adapter takes: fixed values, sets of values, or a rule on the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, fields, replace
from random import Random
from typing import Any

from engine.core.config import KernelConfig
from properties.conformance.protocol import AdapterProblem

# What the kit leaves out unless an adapter asks for it.
PLAIN: dict[str, Any] = {
    "hash_bits": 64,
    "long_prefill_token_threshold": 0,
    "watermark_blocks": 0,
    "reserve_full_prompt": True,
}


def configured(drawn: KernelConfig, options: Mapping[str, Any], seed: int) -> KernelConfig:
    """A drawn configuration with an adapter's `kernel_options`.

    A value is taken as it is; of a set, list, tuple or range one is drawn, unless the drawn
    configuration holds one already; a function gets all fields so far and returns the value.

    Raises:
        AdapterProblem: there is no such option, or a value is impossible.
    """
    unknown = sorted(set(options) - {field.name for field in fields(KernelConfig)})
    if unknown:
        raise AdapterProblem("kernel_options", f"unknown options {', '.join(unknown)}")
    rng = Random(seed)
    config = replace(drawn, **PLAIN)
    for name, allowed in options.items():
        value = _value(getattr(config, name), allowed, asdict(config), rng)
        try:
            changes: dict[str, Any] = {name: value}
            config = replace(config, **changes)
        except (TypeError, ValueError) as error:
            raise AdapterProblem("kernel_options", str(error)) from error
    return config


def _value(drawn: Any, allowed: Any, config: dict[str, Any], rng: Random) -> Any:  # noqa: ANN401
    if callable(allowed):
        rule: Callable[[Mapping[str, Any]], Any] = allowed
        return rule(config)
    if isinstance(allowed, Collection) and not isinstance(allowed, str):
        return drawn if drawn in allowed else rng.choice(sorted(allowed))
    return allowed


def switched_off(options: Mapping[str, Any]) -> bool:
    """Whether prefix caching is off in every configuration that these options allow."""
    allowed = options.get("enable_prefix_caching", True)
    if isinstance(allowed, Collection):
        return not any(allowed)
    return not callable(allowed) and not allowed
