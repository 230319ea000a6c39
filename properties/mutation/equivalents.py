"""Mutants that change nothing, each with the reason; kept beside the suite and not as pragmas.

A pragma switches off a whole line with all its other mutants. In `equivalents.json` the exact change
is named: the function, and its changed lines before and after as `ast.unparse` writes them. A
change that is not listed and survives is a hole.
"""

from __future__ import annotations

import json
from pathlib import Path

Key = tuple[str, str, str]  # function, lines before, lines after


def _read(path: Path) -> dict[Key, str]:
    rows = json.loads(path.read_text())
    return {(row["function"], row["before"], row["after"]): row["why"] for row in rows}


EQUIVALENT = _read(Path(__file__).with_name("equivalents.json"))
