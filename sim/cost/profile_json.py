"""Parts of profile files that all kinds of profiles share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sim.cost.terms import Graphs, Term


def profile_text(document: Mapping[str, Any]) -> str:
    """The text of a profile's file."""
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def terms_to_json(terms: Sequence[Term], values: Sequence[float]) -> list[dict[str, Any]]:
    """Each coefficient with its unit and meaning."""
    return [
        {"name": term.name, "ns": round(value, 3), "per": term.unit, "meaning": term.meaning}
        for term, value in zip(terms, values, strict=True)
    ]


class Limits(msgspec.Struct):
    """The largest step that a model was fitted to."""

    sequences: int
    tokens: int
    kv_tokens: int
    chunk_pairs: int


class GraphSizes(msgspec.Struct):
    """The captured graphs; unlike those of `Graphs` its fields must be there."""

    sizes: tuple[int, ...]
    mixed_up_to: int

    def graphs(self) -> Graphs:
        """The same for a cost model."""
        if [*self.sizes] != sorted(set(self.sizes)):
            raise ValueError("graph sizes are not ascending")
        return Graphs(self.sizes, self.mixed_up_to)


class TermValue(msgspec.Struct):
    """A coefficient as it stands in a file."""

    name: str
    ns: float


class ProfileDocument(msgspec.Struct, kw_only=True):
    """The fields that the files of all kinds of profiles have."""

    model: dict[str, Any]
    hardware: str
    dtype: str
    tp: int
    engine: str
    graphs: GraphSizes
    calibrated_up_to: Limits
    sources: tuple[dict[str, Any], ...]
    held_out: tuple[dict[str, Any], ...]
    free_running_percent: tuple[dict[str, Any], ...] = ()
    lockstep: str = ""


def terms_from_json(terms: Sequence[Term], items: Sequence[TermValue]) -> tuple[float, ...]:
    """The coefficients, in the order of the terms.

    Raises:
        ValueError: other terms, or an impossible coefficient.
    """
    names = [item.name for item in items]
    if names != [term.name for term in terms]:
        raise ValueError(f"terms {names} are not those of this version")
    for item in items:
        if not 0 <= item.ns < 1e12:
            raise ValueError(f"the coefficient {item.name}={item.ns} is negative or not finite")
    return tuple([item.ns for item in items])
