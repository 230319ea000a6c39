"""What a log says of itself, against the model, dtype, GPU and ranks that it is taken for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.core.errors import ConfigError, InputError
from engine.steplog.api import LogHeader
from sim.cost.profile import DTYPES, Target, shape_fields
from sim.specs.hardware import hardware_named
from sim.specs.models import model_named

# The engine's words for the fields of a shape, where they differ.
_ENGINE_WORDS = {"tie_word_embeddings": "tied_embeddings"}


def said_hardware(header: LogHeader) -> str | None:
    """The GPU that a log names: as the table of GPUs has it, else as it stands there."""
    said = header.hardware.get("name") or header.hardware.get("device_name")
    if not said:
        return None
    try:
        return hardware_named(str(said)).name
    except (ConfigError, InputError):
        return str(said)


def said_dtype(header: LogHeader) -> str | None:
    """The dtype that a log names, or one of the width that it gives."""
    dtype = header.model.get("dtype")
    if dtype:
        return str(dtype).removeprefix("torch.")
    width = header.model.get("dtype_bytes")
    return next((name for name, size in DTYPES.items() if size == width), None)


def said_tp(header: LogHeader) -> int | None:
    """The number of ranks that a log names."""
    for where, key in (
        (header.hardware, "tp"),
        (header.hardware, "tensor_parallel_size"),
        (header.model, "tensor_parallel_size"),
    ):
        value = where.get(key)
        if isinstance(value, int):
            return value
    return None


def said_shape(header: LogHeader) -> dict[str, Any]:
    """The fields of the model's shape that a log gives, or that its model's name stands for."""
    given = {_ENGINE_WORDS.get(key, key): value for key, value in header.model.items()}
    name = str(given.get("name") or "").split(" ")[0].rstrip(",")
    try:
        named: Mapping[str, Any] = shape_fields(model_named(name)) if name else {}
    except (ConfigError, InputError):
        named = {}  # a name that nobody knows says nothing about the shape
    return {**named, **given}


def check_log(header: LogHeader, path: object, target: Target) -> None:
    """Refuses a log that says itself that it is of something else.

    What a log does not say is not checked.

    Raises:
        InputError: names the log, what it says, and what it was taken for.
    """
    shape = said_shape(header)
    for key, wanted in target.model.items():
        if key != "name" and key in shape and shape[key] != wanted:
            name = target.model.get("name")
            raise InputError(f"{path}: is of a model with {key}={shape[key]}, {name} has {wanted}")
    dtype = said_dtype(header)
    same_width = DTYPES.get(dtype or "") == DTYPES.get(target.dtype)
    named = "dtype" in header.model
    for what, said, wanted, differs in (
        ("dtype", dtype, target.dtype, dtype != target.dtype if named else not same_width),
        ("hardware", said_hardware(header), target.hardware, None),
        ("tensor_parallel_size", said_tp(header), target.tp, None),
    ):
        if said is not None and (said != wanted if differs is None else differs):
            raise InputError(f"{path}: is of {what} {said}, not {wanted}")
