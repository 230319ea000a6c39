"""Parts of profile files that all kinds of profiles share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sim.cost.terms import Term


def profile_text(document: Mapping[str, Any]) -> str:
    """The text of a profile's file."""
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def terms_to_json(terms: Sequence[Term], values: Sequence[float]) -> list[dict[str, Any]]:
    """Each coefficient with its unit and meaning."""
    return [
        {"name": term.name, "ns": round(value, 3), "per": term.unit, "meaning": term.meaning}
        for term, value in zip(terms, values, strict=True)
    ]


def terms_from_json(terms: Sequence[Term], items: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """The coefficients, in the order of the terms.

    Raises:
        ValueError: other terms, or an impossible coefficient.
    """
    names = [item["name"] for item in items]
    if names != [term.name for term in terms]:
        raise ValueError(f"terms {names} are not those of this version")
    values = tuple(float(item["ns"]) for item in items)
    if not all(0 <= value < 1e12 for value in values):
        raise ValueError("a coefficient is negative or not finite")
    return values
