"""Engines by name: the options that a deployment takes from them, and whose profile holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.core.errors import ConfigError
from sim.specs.hardware import Hardware

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineKind:
    """One engine: `family` is what its profiles' engines begin with."""

    family: str
    options: Callable[[Hardware], Mapping[str, object]]


def _vllm_033(hardware: Hardware) -> Mapping[str, object]:
    """The server's defaults of vLLM 0.33.0 by memory; an A100 counts among the smaller ones."""
    tokens, seqs = 2048, 256
    if hardware.memory_bytes >= 160 * GIB:
        tokens, seqs = 16384, 1024
    elif hardware.memory_bytes >= 70 * GIB and not hardware.name.startswith("a100"):
        tokens, seqs = 8192, 1024
    return {
        "policy": "mixed",
        "async_scheduling": True,
        "max_num_batched_tokens": tokens,
        "max_num_seqs": seqs,
        "gpu_memory_utilization": 0.92,
    }


def _vllm_025(hardware: Hardware) -> Mapping[str, object]:
    """As its recordings ran it: in process, without asynchronous scheduling."""
    return {
        "policy": "mixed",
        "async_scheduling": False,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 256,
    }


def _nano_vllm(hardware: Hardware) -> Mapping[str, object]:
    return {
        "policy": "prefill_first",
        "async_scheduling": False,
        "block_size": 256,
        "max_num_batched_tokens": 16384,
        "max_num_seqs": 512,
        "max_model_len": 4096,
    }


def _lockstep(hardware: Hardware) -> Mapping[str, object]:
    """As its recordings ran it."""
    return {
        "policy": "mixed",
        "async_scheduling": True,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
    }


ENGINES: dict[str, EngineKind] = {
    "vllm-0.33": EngineKind("vllm 0.33", _vllm_033),
    "vllm-0.25": EngineKind("vllm 0.25", _vllm_025),
    "nano-vllm": EngineKind("nano-vllm", _nano_vllm),
    "lockstep": EngineKind("lockstep", _lockstep),
}


def engine_named(name: str) -> EngineKind:
    """The engine of that name.

    Raises:
        ConfigError: none has it.
    """
    if name not in ENGINES:
        raise ConfigError("engine", name, f"must be one of {', '.join(ENGINES)}")
    return ENGINES[name]


def family_of(engine: str) -> str | None:
    """The family that an engine with its version belongs to; None for one without a name here."""
    return next((one.family for one in ENGINES.values() if engine.startswith(one.family)), None)


def family_named(name: str | None) -> str | None:
    """The family of the engine of that name, None for none.

    Raises:
        ConfigError: no engine has it.
    """
    return None if name is None else engine_named(name).family
