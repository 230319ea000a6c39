"""Measured times of vLLM's operators, from the tables of PyPI `aiconfigurator-core`.

The package is optional (`pip install lockstep-llm[optable]`). It reads a model's config.json, so
each shape is written into one; nothing is looked up over a network.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.core.errors import ConfigError
from sim.specs.hardware import Hardware
from sim.specs.models import ModelShape, MoeShape

PACKAGE = "aiconfigurator_core"
# The tables' names of GPUs; what is not here has none, or none for vLLM.
SYSTEMS = {
    "h200": "h200_sxm",
    "h100": "h100_sxm",
    "a100-80gb": "a100_sxm",
    "b200": "b200_sxm",
    "l40s": "l40s",
    "rtxpro6000": "rtx_pro_6000_server",
}
# Their all-reduce is off by orders of magnitude.
_NO_TENSOR_PARALLEL = ("l40s",)
# Context attention has a constant part per call, and decodes are a little dearer in small batches:
# contexts are tabulated in steps of so many tokens, between which times are linear.
CONTEXT_STEP = 64


class OperatorTables:
    """Times in ns of a model's steps on one rank, put together from its operators."""

    def __init__(self, model: ModelShape, hardware: Hardware, tp: int) -> None:
        self._engine = _compiled(model, hardware, tp)
        lists = self._engine_lists()
        self._context_attention = _places(lists[0], "_attention")
        self._decode_attention = _places(lists[1], "_attention")
        self._logits = _places(lists[1], "logits")
        self._dense = [
            place
            for place, name in enumerate(lists[0])
            if place not in self._context_attention and "logits" not in name
        ]
        self.dense_ns = lru_cache(None)(self._dense_ns)
        self.logits_ns = lru_cache(None)(self._logits_ns)
        self._attention_node_ns = lru_cache(None)(self._decode_attention_ns)

    def decode_attention_ns(self, num_rows: int, context_sum: int) -> float:
        """Attention of so many decoding rows over so many KV tokens in all."""
        place, rest = divmod(context_sum, num_rows * CONTEXT_STEP)
        low = self._attention_node_ns(num_rows, place)
        if not rest:
            return low
        share = rest / (num_rows * CONTEXT_STEP)
        return low + share * (self._attention_node_ns(num_rows, place + 1) - low)

    def chunk_attention_ns(self, chunks: tuple[tuple[int, int], ...]) -> float:
        """Attention of prompt chunks; the constant part of a call counts once in a step."""
        total, constant = 0.0, 0.0
        for first, num_tokens in chunks:
            one = self._chunk_ns(1, first)
            constant = max(constant, one)
            total += self._chunk_ns(num_tokens, first) - one
        return constant + total

    def _engine_lists(self) -> list[list[str]]:
        engine = self._engine
        return [[item[0] for item in part] for part in engine[1]]

    def _chunk_ns(self, num_tokens: int, first: int) -> float:
        operators = self._context_attention
        return _sum_ns(
            self._engine[0].evaluate_context_ops(operators, 1, num_tokens, first, 1.0, None)
        )

    def _dense_ns(self, num_tokens: int) -> float:
        call = self._engine[0].evaluate_context_ops
        return _sum_ns(call(self._dense, 1, num_tokens, 0, 1.0, num_tokens))

    def _logits_ns(self, num_rows: int) -> float:
        call = self._engine[0].evaluate_generation_ops
        return _sum_ns(call(self._logits, num_rows, 1, 1.0, 0, num_rows))

    def _decode_attention_ns(self, num_rows: int, place: int) -> float:
        call = self._engine[0].evaluate_generation_ops
        context = max(1, place * CONTEXT_STEP)
        return _sum_ns(call(self._decode_attention, num_rows, context, 1.0, 0, None))


def why_no_tables(model: ModelShape, hardware: Hardware, tp: int) -> str | None:
    """Why there are no operator tables for a deployment, or None."""
    if find_spec(PACKAGE) is None:
        return "the package aiconfigurator-core is not installed"
    if hardware.name not in SYSTEMS:
        return f"no tables of vLLM's operators on {hardware.name}"
    if tp > 1 and hardware.name in _NO_TENSOR_PARALLEL:
        return f"no usable all-reduce table of {hardware.name}"
    if config_of(model) is None:
        return f"{model.name} is no dense or mixed decoder in 16 bit with full attention"
    return _missing(model, hardware, tp)


@lru_cache(maxsize=256)
def _missing(model: ModelShape, hardware: Hardware, tp: int) -> str | None:
    """What the tables lack of a step of each kind, which only a query tells; None for nothing."""
    try:
        tables = _tables(model, hardware, tp)
        for tokens in (1, 4096):
            tables.dense_ns(tokens)
        tables.logits_ns(1)
        tables.decode_attention_ns(1, 1)
        tables.chunk_attention_ns(((0, 512),))
    except (ValueError, RuntimeError, KeyError) as error:
        line = (str(error).splitlines() or ["?"])[0][:120]
        return f"the tables of {hardware.name} lack {model.name}: {line}"
    return None


def tables_of(model: ModelShape, hardware: Hardware, tp: int) -> OperatorTables:
    """The tables of a deployment.

    Raises:
        ConfigError: there are none.
    """
    reason = why_no_tables(model, hardware, tp)
    if reason is not None:
        raise ConfigError("cost", "optable", reason)
    return _tables(model, hardware, tp)


@lru_cache(maxsize=32)
def _tables(model: ModelShape, hardware: Hardware, tp: int) -> OperatorTables:
    return OperatorTables(model, hardware, tp)


def config_of(model: ModelShape) -> dict[str, Any] | None:
    """A config.json that says the shape in the field's words; None for what has no table."""
    if model.dtype_bytes != 2 or model.window is not None:
        return None
    if type(model) not in (ModelShape, MoeShape):
        return None
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position,
        "tie_word_embeddings": model.tied_embeddings,
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }
    if isinstance(model, MoeShape):
        if not model.is_mixture:
            return None
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": model.num_experts,
            "num_experts_per_tok": model.experts_per_token,
            "moe_intermediate_size": model.moe_intermediate_size,
            "norm_topk_prob": True,
        }
    elif not model.is_plain:
        return None
    return config


def _compiled(model: ModelShape, hardware: Hardware, tp: int) -> tuple[Any, Any]:
    """The package's engine and the names of its operators in prefill and decode."""
    # It logs lines of its own to stderr.
    logging.getLogger(PACKAGE).setLevel(logging.CRITICAL)
    from aiconfigurator_core.sdk.engine import EngineHandle

    ranks = {"tp_size": tp}
    if isinstance(model, MoeShape):
        ranks |= {"moe_tp_size": tp, "moe_ep_size": 1}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_of(model)), encoding="utf-8")
        handle = EngineHandle.compile(folder, SYSTEMS[hardware.name], "vllm", **ranks)
        operators = handle.run_static_per_op(batch_size=1, isl=CONTEXT_STEP, osl=2)
    return handle._engine, operators


def _places(names: list[str], part: str) -> list[int]:
    found = [place for place, name in enumerate(names) if part in name]
    if not found:
        raise ValueError(f"the tables know no operator {part.strip('_')} of this model")
    return found


def _sum_ns(operators: Iterable[tuple[str, float, float, str]]) -> float:
    """Operators are tuples of name, ms over all layers, energy and source."""
    return 1e6 * float(sum([item[1] for item in operators]))
