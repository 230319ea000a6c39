"""The corpus of the coverage-guided search keeps all laws, and its lists survive being changed."""

from __future__ import annotations

from random import Random

import pytest

from properties.fuzzing.lists import MOST_OPERATIONS, corpus, decode, encode, mutated
from properties.search.run import run_workload
from properties.search.workloads import random_workload

NUM_PARTS = 4
LINES = corpus()


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_every_list_of_the_corpus_keeps_all_laws(part: int) -> None:
    assert len(LINES) > 100
    for line in LINES[part::NUM_PARTS]:
        run_workload(decode(line))


def test_a_list_is_one_line_and_comes_back_whole() -> None:
    for seed in range(50):
        workload = random_workload(seed, is_async=seed % 2 == 0)
        line = encode(workload)
        assert b"\n" not in line
        assert encode(decode(line)) == line
        assert decode(line).config == workload.config


def test_changed_lists_are_lists_again_and_differ() -> None:
    rng = Random(3)
    workload, seen = random_workload(4), set()
    for _ in range(200):
        try:
            workload = mutated(workload, rng, random_workload(rng.getrandbits(20)))
        except ValueError:  # such a configuration is refused
            continue
        assert len(workload.operations) <= MOST_OPERATIONS
        seen.add(encode(workload))
        run_workload(workload, thorough=False)
    assert len(seen) > 150
