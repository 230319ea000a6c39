"""Lockstep's engine: the scheduling kernel, and the GPU/CPU engine around it.

Owns everything between a prompt and its output. Imports nothing of `sim`, `properties` or
`golden`; heavy names are imported on first use, so that `engine.core` never needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams"]

_HOMES = {"LLM": "engine.llm", "SamplingParams": "engine.sampling_params"}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
