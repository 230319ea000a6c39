"""The shape of a model's mixtures of experts, resolved from an HF config; knows no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.core.errors import ConfigError
from engine.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class MoeFamily:
    """How a family names its experts, and what it leaves to the config."""

    block: str  # the mixture's name inside a layer
    parts: tuple[str, str, str]  # names of an expert's gate, up and down projection
    always_renormalised: bool = False
    size_key: str = "moe_intermediate_size"
    has_shared_expert: bool = False


QWEN_MOE = MoeFamily("mlp", ("gate_proj", "up_proj", "down_proj"))
QWEN2_MOE = MoeFamily("mlp", ("gate_proj", "up_proj", "down_proj"), has_shared_expert=True)
MIXTRAL = MoeFamily(
    "block_sparse_moe", ("w1", "w3", "w2"), always_renormalised=True, size_key="intermediate_size"
)


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Sizes of the mixtures and the layers that hold one; the other layers are dense."""

    family: MoeFamily
    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of one expert
    shared_intermediate_size: int  # 0: no expert sees every token
    renormalised: bool  # whether the weights of the chosen experts sum to one
    sparse_layers: frozenset[int]


def resolve_moe(raw: Mapping[str, Any], family: MoeFamily, num_layers: int) -> MoeConfig:
    """The mixtures of an HF config; raises UnsupportedModel naming the key."""
    # Transformers 5 writes the second name for every family.
    count_key = "num_experts" if raw.get("num_experts") is not None else "num_local_experts"
    num_experts = _positive(raw, count_key)
    chosen = _positive(raw, "num_experts_per_tok")
    if chosen > num_experts:
        raise UnsupportedModel(
            f"num_experts_per_tok={chosen} is more than {count_key}={num_experts}"
        )
    shared = 0
    if family.has_shared_expert:
        shared = _positive(raw, "shared_expert_intermediate_size")
    return MoeConfig(
        family=family,
        num_experts=num_experts,
        num_experts_per_tok=chosen,
        intermediate_size=_positive(raw, family.size_key),
        shared_intermediate_size=shared,
        renormalised=family.always_renormalised or bool(raw.get("norm_topk_prob", False)),
        sparse_layers=_sparse_layers(raw, num_layers),
    )


def check_expert_split(moe: MoeConfig | None, size: int, expert_parallel: bool) -> None:
    """Raise ConfigError if the experts cannot be split over `size` ranks; None has no experts."""
    if moe is None:
        if expert_parallel:
            raise ConfigError("expert_parallel", True, "the model has no experts")
        return
    if expert_parallel and moe.num_experts % size:
        raise ConfigError(
            "tensor_parallel_size",
            size,
            f"with expert_parallel it must divide the {moe.num_experts} experts",
        )
    widths = {"the shared expert's size": moe.shared_intermediate_size}
    if not expert_parallel:
        widths["the experts' intermediate size"] = moe.intermediate_size
    for what, width in widths.items():
        if width % size:
            raise ConfigError("tensor_parallel_size", size, f"must divide {what}, {width}")


def _sparse_layers(raw: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    every = 1 if raw.get("decoder_sparse_step") is None else _positive(raw, "decoder_sparse_step")
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(
        isinstance(i, int) and not isinstance(i, bool) and 0 <= i < num_layers for i in dense
    ):
        raise UnsupportedModel(
            f"mlp_only_layers={dense!r} must list layers below num_hidden_layers={num_layers}"
        )
    return frozenset(i for i in range(num_layers) if (i + 1) % every == 0 and i not in dense)


def _positive(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"{key}={value!r} must be a positive integer")
    return value
