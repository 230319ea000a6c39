"""CONTRIBUTING.md is true: its files exist, and no change needs more of them than it says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
ROWS = re.findall(r"^\| (an? .+?) \| (.+?) \| (.+?) \|$", TEXT, re.MULTILINE)
PLACES = re.compile(r"`([\w./]+/[\w./]*)`")


def test_all_six_kinds_of_additions_are_described():
    kinds = " ".join(row[0] for row in ROWS)
    for word in ("model", "attention backend", "policy", "cost model", "trace format", "law"):
        assert word in kinds


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_an_addition_touches_two_files_and_a_law_three(row):
    kind, files, proof = row
    assert 1 <= len(re.split(r", (?!if|and)", files)) <= (3 if kind == "a law" else 2)
    assert PLACES.findall(proof)


def test_every_place_named_exists():
    missing = [name for name in PLACES.findall(TEXT) if not (ROOT / name).exists()]
    missing += [name for name in re.findall(r"\]\(([\w./]+)\)", TEXT) if not (ROOT / name).exists()]
    assert not missing
