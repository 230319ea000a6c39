"""Every state of a tiny scope keeps every law; the number of states is printed and pinned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.core.config import KernelConfig
from engine.core.plan import StepPlan
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.tokens import Prompt
from properties.defects.prefix_cache import HitsLastBlock
from properties.defects.tables import AppendsAtBlockMultiple
from properties.follower.view import LawBroken
from properties.search.exhaustive import (
    DEFAULT_SCOPES,
    SCOPES,
    SIX_SHAPES,
    Scope,
    enumerate_states,
    small_config,
)
from properties.search.kernel_state import kernel_state

# States, pictures of the follower, transitions. A change of these numbers is a change of the
# kernel's reachable states: look at it, then pin it.
PINNED = {
    ("2x30", "mixed"): (9710, 4303, 20808),
    ("2x30", "prefill_first"): (10325, 5315, 19264),
    ("3x6", "mixed"): (4988, 1843, 14742),
    ("3x6", "prefill_first"): (4391, 1972, 10994),
    ("2x14-abort", "mixed"): (1977, 1211, 12754),
    ("2x14-abort", "prefill_first"): (2125, 1231, 11862),
}


@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
@pytest.mark.parametrize("scope", DEFAULT_SCOPES)
def test_every_reachable_state_keeps_the_laws(scope: str, policy: str) -> None:
    count = enumerate_states(small_config(policy), SCOPES[scope])
    print(f"{scope} {policy}: {count}")
    assert (count.states, count.pictures, count.transitions) == PINNED[scope, policy]
    # What the follower believes decides what follows: it is a bisimulation of these scopes.
    assert count.unlike == 0


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
@pytest.mark.parametrize("scope", ["3x30", "4x6"])
def test_every_reachable_state_of_a_larger_scope_keeps_the_laws(scope: str, policy: str) -> None:
    count = enumerate_states(small_config(policy), SCOPES[scope], with_reference=False)
    print(f"{scope} {policy}: {count}")
    assert count.unlike == 0
    assert count.states > 10_000


@pytest.mark.parametrize("mutant", [AppendsAtBlockMultiple, HitsLastBlock])
def test_enumeration_finds_planted_defects(mutant: type) -> None:
    with pytest.raises((LawBroken, AssertionError)):
        enumerate_states(small_config("mixed"), SCOPES["2x30"], mutant)


class _Remembers(Scheduler):
    """Holds something that no law sees and that decides: after three steps it takes no prompt."""

    def __init__(self, config: KernelConfig) -> None:
        super().__init__(config)
        self.steps = 0

    def schedule(self) -> StepPlan:
        self.steps = min(3, self.steps + 1)
        budget = 1 if self.steps == 3 else self.config.max_num_batched_tokens
        self.state.config = replace(self.config, max_num_batched_tokens=budget)
        return super().schedule()


def test_states_that_only_the_kernel_tells_apart_are_visited_and_counted_as_unlike() -> None:
    scope = Scope(2, SIX_SHAPES[:3])
    config = small_config("mixed")
    plain = enumerate_states(config, scope, with_reference=False)
    hidden = enumerate_states(config, scope, _Remembers, with_reference=False)  # type: ignore[arg-type]
    assert hidden.states > plain.states
    assert plain.unlike == 0


def test_the_kernel_state_is_one_value_for_renamed_blocks_and_requests() -> None:
    def after(blocks_before: int, name: str) -> Scheduler:
        scheduler = Scheduler(small_config("mixed"))
        for number in range(blocks_before):
            scheduler.add(Request(f"gone{number}", Prompt([number]), 1))
            scheduler.commit(scheduler.schedule(), [0])
        scheduler.add(Request(name, Prompt([0, 1, 1]), 4))
        scheduler.commit(scheduler.schedule(), [1])
        return scheduler

    assert kernel_state(after(0, "a")) == kernel_state(after(0, "b"))
    assert kernel_state(after(1, "a")) == kernel_state(after(2, "a"))
    other = after(0, "a")
    other.commit(other.schedule(), [0])
    assert kernel_state(after(0, "a")) != kernel_state(other)
