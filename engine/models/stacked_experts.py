"""Checkpoints that store the experts of a layer as one tensor per projection.

The layers name every expert's matrices one by one, as most checkpoints do. Here those names are
found again in `experts.gate_up_proj` [E, 2 I, H] and `experts.down_proj` [E, H, I].
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from engine.layers.weights import WeightSlice

_EXPERT = re.compile(
    r"(?P<block>.+\.experts\.)(?P<expert>\d+)\.(?:(?P<gate>gate_proj|w1)|(?P<up>up_proj|w3)|"
    r"(?:down_proj|w2))\.weight"
)


@dataclass(frozen=True, slots=True)
class StoredPlace:
    """Where a matrix lies: a tensor of its own, or one expert's rows of a stacked one."""

    name: str
    shape: tuple[int, ...]  # of the stored tensor
    expert: int | None = None
    first_row: int = 0


def stored_places(
    slices: Iterable[WeightSlice], stored: Collection[str]
) -> tuple[dict[str, StoredPlace], list[str]]:
    """(place of every slice by its name, names that are stored in neither form)."""
    items = list(slices)
    num_experts = _num_experts(item.name for item in items)
    places: dict[str, StoredPlace] = {}
    missing: list[str] = []
    for item in items:
        place = _place(item, stored, num_experts)
        if place is None:
            missing.append(item.name)
        else:
            places[item.name] = place
    return places, missing


def _num_experts(names: Iterable[str]) -> dict[str, int]:
    """Experts of every block of experts."""
    found: dict[str, int] = {}
    for name in names:
        match = _EXPERT.fullmatch(name)
        if match is not None:
            block = match["block"]
            found[block] = max(found.get(block, 0), int(match["expert"]) + 1)
    return found


def _place(
    item: WeightSlice, stored: Collection[str], num_experts: dict[str, int]
) -> StoredPlace | None:
    if item.name in stored:
        return StoredPlace(item.name, item.full_shape)
    # Transformers 5 calls every family's mixture `mlp` in memory.
    other_name = item.name.replace(".block_sparse_moe.", ".mlp.")
    if other_name in stored:
        return StoredPlace(other_name, item.full_shape)
    match = _EXPERT.fullmatch(item.name)
    if match is None:
        return None
    is_wide = bool(match["gate"] or match["up"])
    for block in (match["block"], match["block"].replace(".block_sparse_moe.", ".mlp.")):
        name = f"{block}{'gate_up_proj' if is_wide else 'down_proj'}"
        if name in stored:
            rows, columns = item.full_shape
            shape = (num_experts[match["block"]], rows * (2 if is_wide else 1), columns)
            return StoredPlace(name, shape, int(match["expert"]), rows if match["up"] else 0)
    return None
