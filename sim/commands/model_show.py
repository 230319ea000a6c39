"""`lockstep model show`: what the simulator takes a model for, before it is used."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence

from engine.arguments.parser import VerbParser
from sim.run.option_table import SIM_TABLE
from sim.specs.architecture import EXPERT, Architecture
from sim.specs.models import (
    DTYPE_BYTES,
    KV_DTYPES,
    architecture_named,
    served_dtype,
    served_kv_dtype,
)


def main(argv: Sequence[str]) -> int:
    """Prints the sizes of one model; returns the exit code 0.

    Raises:
        ConfigError, InputError: no such model, or one whose layers are not known.
    """
    parser = VerbParser("model show", "Show what the simulator takes a model for.", SIM_TABLE)
    parser.add_argument("model", metavar="NAME|FOLDER|config.json", help="the model")
    for name in ("dtype", "kv_cache_dtype"):
        parser.option(name, "auto")
    parser.option("json")
    arguments = parser.parse(argv)
    built = architecture_named(arguments.model)
    sheet = model_sheet(built, arguments)
    if arguments.json:
        print(json.dumps(sheet, indent=2))
    else:
        print(_text(sheet))
    return 0


def model_sheet(built: Architecture, arguments: argparse.Namespace) -> dict[str, object]:
    """What is known of a model, as it is served."""
    dtype = served_dtype(built, arguments.dtype)
    kv_dtype = served_kv_dtype(built, arguments.dtype, arguments.kv_cache_dtype)
    values = built.kv_values_per_token
    windows = sorted({layer.window for layer in built.layers if layer.window is not None})
    return {
        "name": built.name,
        "model_type": built.model_type,
        "parameters": built.num_params,
        "active_parameters": built.active_params,
        "params_b": round(built.num_params / 1e9, 4),
        "weight_bytes": built.weight_bytes(DTYPE_BYTES[dtype]),
        "kv_bytes_per_token": values * KV_DTYPES[kv_dtype],
        "kv_bytes_per_token_16bit": values * 2,
        "dtype": dtype,
        "stored_dtype": built.stored_dtype,
        "kv_cache_dtype": kv_dtype,
        "quantization": built.quantization.describe(),
        "layers": len(built.layers),
        "attention": _attention(built),
        "sliding_window": windows[0] if windows else None,
        "experts": built.num_experts,
        "experts_per_token": built.experts_per_token,
        "expert_layers": sum(bool(layer.params(EXPERT)) for layer in built.layers),
        "positions": built.positions,
        "max_position_embeddings": built.max_position,
        "tie_word_embeddings": built.tied_embeddings,
        "not_modelled": [*built.not_modelled, *_window_limit(windows)],
        "notes": list(built.notes),
    }


def _attention(built: Architecture) -> str:
    """The kinds of layers, with how many there are of each."""
    kinds = Counter(layer.attention for layer in built.layers)
    heads = f"{built.num_heads} query and {built.num_kv_heads} KV heads of {built.head_dim}"
    if len(kinds) == 1:
        return f"{next(iter(kinds))}, {heads}"
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) + f"; {heads}"


def _window_limit(windows: Sequence[int]) -> list[str]:
    if not windows:
        return []
    return [f"sliding windows: runs need --max-model-len of at most {windows[0]}"]


def _text(sheet: dict[str, object]) -> str:
    lines = []
    for key, value in sheet.items():
        if value in ([], None) or key in ("params_b", "kv_bytes_per_token_16bit"):
            continue
        shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value
        if isinstance(value, list):
            shown = "; ".join(str(part) for part in value)
        lines.append(f"  {key.replace('_', ' '):<26}{shown}")
    return "\n".join(lines)
