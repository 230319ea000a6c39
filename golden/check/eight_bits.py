"""HF with 8-bit numbers where the engine has them: the yardstick of a quantised run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.layers.fp8 import quantise_rows
from engine.options import EngineOptions
from golden.fp8 import register_kv_attention, rounded_inputs
from golden.reference import attention_of


@dataclass(frozen=True, slots=True)
class EightBits:
    """What is kept in 8-bit floats: matrices with the rows that they read, or keys and values."""

    matrices: bool
    kv: bool

    def __bool__(self) -> bool:
        return self.matrices or self.kv


def eight_bits_of(options: EngineOptions) -> EightBits:
    """What an engine's options ask for."""
    return EightBits(options.quantization is not None, options.kv_cache_dtype != "auto")


@contextmanager
def eight_bit_arithmetic(model: nn.Module, what: EightBits) -> Iterator[None]:
    """Makes HF round inputs, keys and values as the engine does."""
    with ExitStack() as stack:
        if what.matrices:
            stack.enter_context(rounded_inputs(model, None))
        if what.kv:
            stack.enter_context(attention_of(model, register_kv_attention()))
        yield


@torch.no_grad()
def quantise_matrices(model: nn.Module) -> None:
    """Rounds every matrix that the engine quantises while loading, row by row."""
    for name, module in model.named_modules():
        if name.endswith("_proj") and isinstance(module, nn.Linear):
            module.weight.copy_(_rounded(module.weight))
        elif type(module).__name__.endswith("Experts"):
            experts: Any = module
            for stack in (experts.gate_up_proj, experts.down_proj):
                stack.copy_(_rounded(stack))


def _rounded(weight: Tensor) -> Tensor:
    rows = weight.reshape(-1, weight.shape[-1])
    return quantise_rows(rows).dequantised().reshape(weight.shape)
