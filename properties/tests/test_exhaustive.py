"""Every state of a tiny scope keeps every law; the number of states is printed and pinned."""

from __future__ import annotations

import pytest

from properties.defects.prefix_cache import HitsLastBlock
from properties.defects.tables import AppendsAtBlockMultiple
from properties.follower.view import LawBroken
from properties.search.exhaustive import DEFAULT_SCOPES, SCOPES, enumerate_states, small_config

# A change of these numbers is a change of the kernel's reachable states: look at it, then pin it.
PINNED = {
    ("2x30", "mixed"): (4303, 12132),
    ("2x30", "prefill_first"): (5315, 12508),
    ("3x6", "mixed"): (1843, 6725),
    ("3x6", "prefill_first"): (1972, 5894),
    ("2x14-abort", "mixed"): (1211, 10456),
    ("2x14-abort", "prefill_first"): (1231, 8856),
}


@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
@pytest.mark.parametrize("scope", DEFAULT_SCOPES)
def test_every_reachable_state_keeps_the_laws(scope: str, policy: str) -> None:
    count = enumerate_states(small_config(policy), SCOPES[scope])
    print(f"{scope} {policy}: {count.states} states, {count.transitions} transitions")
    assert (count.states, count.transitions) == PINNED[scope, policy]


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
@pytest.mark.parametrize("scope", ["3x30", "4x6"])
def test_every_reachable_state_of_a_larger_scope_keeps_the_laws(scope: str, policy: str) -> None:
    count = enumerate_states(small_config(policy), SCOPES[scope], with_reference=False)
    print(f"{scope} {policy}: {count.states} states, {count.transitions} transitions")
    assert count.states > 10_000


@pytest.mark.parametrize("mutant", [AppendsAtBlockMultiple, HitsLastBlock])
def test_enumeration_finds_planted_defects(mutant: type) -> None:
    with pytest.raises((LawBroken, AssertionError)):
        enumerate_states(small_config("mixed"), SCOPES["2x30"], mutant)
