"""Every state of a tiny scope keeps every law; the number of states is printed and pinned."""

from __future__ import annotations

import os
import pickle
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import pytest

from engine.core.config import KernelConfig
from engine.core.plan import StepOutcome, StepPlan
from engine.core.request import Request, RequestId
from engine.core.scheduler import Scheduler
from engine.core.tokens import Prompt
from properties.defects.prefix_cache import HitsLastBlock
from properties.defects.tables import AppendsAtBlockMultiple
from properties.follower.view import LawBroken
from properties.search import exhaustive
from properties.search.driver import Driver
from properties.search.exhaustive import enumerate_states
from properties.search.kernel_state import kernel_state
from properties.search.run import make_driver
from properties.search.scopes import (
    DEFAULT_SCOPES,
    SCOPES,
    SIX_SHAPES,
    Scope,
    prompts_up_to,
    small_config,
)

# States, pictures of the follower, transitions. A change of these numbers is a change of the
# kernel's reachable states: look at it, then pin it.
PINNED = {
    ("2x30", "mixed"): (9597, 4303, 20808),
    ("2x30", "prefill_first"): (9941, 5315, 19264),
    ("3x6", "mixed"): (4694, 1843, 14349),
    ("3x6", "prefill_first"): (4128, 1972, 10686),
    ("2x14-abort", "mixed"): (1943, 1211, 12754),
    ("2x14-abort", "prefill_first"): (2067, 1231, 11862),
    ("2x6-watermark", "mixed"): (379, 220, 835),
    ("2x3-discard", "mixed"): (185, 76, 1044),
    ("2x3-discard", "prefill_first"): (177, 82, 975),
    ("2x2-async", "mixed"): (963, 600, 4754),
    ("2x2-async", "prefill_first"): (799, 448, 3689),
}

PINNED_NIGHTLY = {
    ("3x6-watermark", "mixed"): (4277, 1712, 12653),
    ("3x3-discard", "mixed"): (1459, 363, 13161),
    ("3x3-discard", "prefill_first"): (1283, 453, 10011),
    ("3x3-async", "mixed"): (6818, 2627, 21124),
    ("3x3-async", "prefill_first"): (5867, 2391, 15695),
    ("2x6-async", "mixed"): (7820, 3538, 39477),
    ("2x6-async", "prefill_first"): (6275, 2662, 30258),
}


def _runs(scopes: Iterable[str]) -> list[tuple[str, str]]:
    return [(scope, policy) for scope in scopes for policy in SCOPES[scope].policies]


@pytest.mark.parametrize(("scope", "policy"), _runs(DEFAULT_SCOPES))
def test_every_reachable_state_keeps_the_laws(scope: str, policy: str) -> None:
    count = enumerate_states(SCOPES[scope].config(policy), SCOPES[scope])
    print(f"{scope} {policy}: {count}")
    assert (count.states, count.pictures, count.transitions) == PINNED[scope, policy]
    # What the follower believes decides what follows: it is a bisimulation of these scopes. With
    # plans open the kernel also knows which of them gave a block its key.
    assert count.unlike == 0 or dict(SCOPES[scope].options).get("async_scheduling")


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("scope", "policy"), _runs(set(SCOPES) - set(DEFAULT_SCOPES)))
def test_every_reachable_state_of_a_larger_scope_keeps_the_laws(scope: str, policy: str) -> None:
    count = enumerate_states(
        SCOPES[scope].config(policy), SCOPES[scope], with_reference=False, jobs=os.cpu_count() or 1
    )
    print(f"{scope} {policy}: {count}")
    found = (count.states, count.pictures, count.transitions)
    assert found == PINNED_NIGHTLY.get((scope, policy), found)
    assert count.states > 300


def test_processes_that_share_a_depth_find_the_same_states() -> None:
    scope = Scope(2, SIX_SHAPES, discards=True)
    alone = enumerate_states(scope.config("mixed"), scope)
    shared = enumerate_states(scope.config("mixed"), scope, jobs=2)
    assert alone.states > 100
    assert (alone.states, alone.transitions) == (shared.states, shared.transitions)


def test_an_alarm_in_a_process_that_shares_a_depth_is_told() -> None:
    scope = Scope(2, prompts_up_to(3))
    with pytest.raises(AssertionError, match="LAW-"):
        enumerate_states(small_config("mixed"), scope, _LateDefect, jobs=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("mutant", [AppendsAtBlockMultiple, HitsLastBlock])
def test_enumeration_finds_planted_defects(mutant: type) -> None:
    with pytest.raises((LawBroken, AssertionError)):
        enumerate_states(small_config("mixed"), SCOPES["2x30"], mutant)


class _LateDefect(Scheduler):
    """Goes wrong after both requests have come, when there are many states."""

    def commit(
        self, plan: StepPlan, token_ids: Sequence[int], stopped: Collection[RequestId] = ()
    ) -> StepOutcome:
        outcome = super().commit(plan, token_ids, stopped)
        if outcome.finished and len(self.state.sequences) == 1:
            self.state.manager.pool.num_free -= 1
        return outcome


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


def _state_key(driver: Driver) -> bytes:
    return exhaustive._key(driver, exhaustive._digest(exhaustive._picture(driver)), False)


def test_states_with_one_key_go_on_alike() -> None:
    """The key is a bisimulation: of two states with one key the same states follow."""
    scope = Scope(2, SIX_SHAPES[:4], options=(("watermark_blocks", 1),))
    start = make_driver(scope.config("mixed"), 2, suspended=frozenset({"E1", "E4", "K11"}))
    start.follower.__class__ = exhaustive._ForcedFollower
    start.audit = None
    queue = [start]
    follows: dict[bytes, dict[object, bytes]] = {}
    num_again = 0
    while queue:
        here = queue.pop()
        key = _state_key(here)
        successors = dict(exhaustive._successors(pickle.dumps(here), scope))
        after = {action: _state_key(driver) for action, driver in successors.items()}
        if key in follows:
            assert follows[key] == after
            num_again += 1
            continue
        follows[key] = after
        queue += successors.values()
    assert num_again > 100
