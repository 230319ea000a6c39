"""Tests that are run against each mutant of the kernel, beside its own.

The name keeps pytest from collecting this file in ordinary runs, where longer suites do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.core.config import KernelConfig
from engine.core.decode_set import DecodeSet
from engine.core.errors import KernelBug, RequestRejected
from engine.core.free_list import FreeList
from engine.core.hashing import PrefixIndex
from engine.core.request import Request
from engine.core.scheduler import Scheduler, SchedulerDead, StepOrderError
from engine.core.sequence import Sequence
from engine.core.state import KernelState
from engine.core.tokens import Prompt
from engine.core.views import UnknownRequest
from properties.defects.decisions import PausesWithFullQueue
from properties.mutation.situations import (
    crowded_decodes,
    crowded_otherwise,
    fast_forward,
    late_prompts,
    limits_out_of_order,
    under_pressure,
    with_options,
)
from properties.search import probes
from properties.search.run import run_workload
from properties.search.workloads import crowded_prompts, random_workload


def _run(seeds: range, is_async: bool = False) -> None:
    for seed in seeds:
        run_workload(random_workload(seed, is_async=is_async))


def test_a_few_workloads() -> None:
    _run(range(40))


def test_a_few_workloads_with_several_half_done_prompts() -> None:
    for seed in range(120):
        workload = random_workload(seed, "mixed")
        config = replace(
            workload.config,
            long_prefill_token_threshold=1 + seed % 7,
            reserve_full_prompt=seed % 2 == 0,
            num_blocks=2 + seed % 4,
            max_num_batched_tokens=2 + seed % 5 if seed % 3 else 32,
            max_num_seqs=4,
        )
        run_workload(replace(workload, config=config))


@pytest.mark.parametrize("budget", [2, 3, 4, 5, 6, 9])
def test_decodes_behind_half_done_prompts(budget: int) -> None:
    for threshold in (1, 2, 3):
        run_workload(late_prompts(budget, threshold))


def test_decodes_beyond_the_budget() -> None:
    for seed in range(48):
        run_workload(crowded_decodes(seed))


def test_a_shortage_that_nobody_can_resolve_is_an_alarm_of_its_law() -> None:
    scheduler = Scheduler(KernelConfig(num_blocks=4, max_model_len=16))
    with pytest.raises(AssertionError, match=r"^LAW-T4: only running sequences ask for blocks$"):
        scheduler.state.newest()


def test_a_sequence_tells_its_state_in_messages() -> None:
    scheduler = Scheduler(KernelConfig(num_blocks=4, max_model_len=16, block_size=2))
    scheduler.add(Request("a", Prompt([1, 2, 3]), 3))
    sequence = scheduler.state.sequences["a"]
    assert repr(sequence) == "Sequence('a', 0 computed, 0 blocks)"
    scheduler.schedule()
    assert repr(sequence) == "Sequence('a', decoding, 2 blocks)"


def test_the_free_list_knows_its_length() -> None:
    free = FreeList()
    for count, block in enumerate((3, 0, 7), start=1):
        free.push(block)
        assert len(free) == count
    free.remove(0)
    assert len(free) == 2
    assert (free.pop(), len(free)) == (3, 1)
    assert (free.pop(), len(free)) == (7, 0)
    free.push(0)
    assert list(free) == [0]


def test_blocks_that_were_never_used_have_neither_holders_nor_key() -> None:
    pool = Scheduler(KernelConfig(num_blocks=4, max_model_len=16)).state.manager.pool
    assert (pool.num_touched, pool.num_free) == (0, 4)
    assert [pool.ref_count(block) for block in range(4)] == [0] * 4
    assert [pool.node_of(block) for block in range(4)] == [None] * 4
    pool.take(2)
    assert (pool.num_touched, pool.num_free) == (2, 2)
    assert [pool.ref_count(block) for block in range(4)] == [1, 1, 0, 0]
    assert [pool.node_of(block) for block in range(4)] == [None] * 4


def test_a_few_async_workloads() -> None:
    _run(range(30), is_async=True)


def test_a_few_runs() -> None:
    for seed in range(40):
        run_workload(fast_forward(seed))


@pytest.mark.parametrize(
    "probe",
    [
        probes.double_free,
        probes.round_trip,
        probes.hash_chain,
        probes.impossible_configs,
        probes.determinism,
    ],
)
def test_probes(probe: object) -> None:
    assert callable(probe)
    probe()


def test_chain_hashes_are_pinned() -> None:
    assert probes.chain_hashes() == PINNED_HASHES


def test_misuse_is_refused_by_name() -> None:
    config = KernelConfig(num_blocks=4, max_model_len=16, block_size=4)
    scheduler = Scheduler(config)
    with pytest.raises(StepOrderError, match=r"^schedule\(\) was called without work$"):
        scheduler.schedule()
    with pytest.raises(UnknownRequest, match="no live request 5"):
        scheduler.abort(5)
    for request, reason in (
        (Request(0, Prompt([]), 1), "prompt_empty"),
        (Request(0, Prompt([1]), 0), "max_tokens"),
        (Request(0, Prompt([1]), 2, min_tokens=3), "min_tokens"),
        (Request(0, Prompt([1]), 2, min_tokens=-1), "min_tokens"),
        (Request(0, Prompt(range(16)), 1), "prompt_too_long"),
    ):
        with pytest.raises(RequestRejected) as caught:
            scheduler.add(request)
        assert caught.value.reason == reason
    scheduler.add(Request(0, Prompt([1]), 2))
    with pytest.raises(RequestRejected, match="live request"):
        scheduler.add(Request(0, Prompt([1]), 2))
    plan = scheduler.schedule()
    with pytest.raises(StepOrderError, match=r"^schedule\(\) was called with an uncommitted plan$"):
        scheduler.schedule()
    with pytest.raises(StepOrderError, match="2 tokens for 1"):
        scheduler.commit(plan, [1, 2])
    scheduler.commit(plan, [1])
    with pytest.raises(StepOrderError, match="not the oldest"):
        scheduler.commit(plan, [1])


def test_a_stop_string_names_a_live_request() -> None:
    scheduler = Scheduler(KernelConfig(num_blocks=4, max_model_len=16, block_size=4))
    scheduler.add(Request(0, Prompt([1]), 5))
    plan = scheduler.schedule()
    with pytest.raises(StepOrderError, match="5 has no token in it to stop at"):
        scheduler.commit(plan, [7], stopped=[5])
    (ended,) = scheduler.commit(plan, [7], stopped=[0]).finished
    assert (ended.reason, list(ended.output_token_ids)) == ("stop", [7])


def test_a_step_without_tokens_is_an_alarm_of_its_law() -> None:
    scheduler = PausesWithFullQueue(KernelConfig(num_blocks=4, max_model_len=16, block_size=4))
    for name in (0, 1):
        scheduler.add(Request(name, Prompt([1]), 5))
    with pytest.raises(KernelBug, match="step 0 schedules nothing") as caught:
        scheduler.schedule()
    assert caught.value.law == "L1"


def test_hashes_are_cut_to_their_bits() -> None:
    whole = probes.chain_hashes()
    for bits in (1, 4, 63, 64):
        cut = [node.hash for node in probes.chain_of(PrefixIndex(bits))]
        assert cut[0] < 1 << bits
        assert cut[1] < 1 << bits
        assert bits < 64 or cut == whole


def test_an_id_is_taken_until_its_last_step_in_flight_is_committed() -> None:
    config = KernelConfig(num_blocks=4, max_model_len=16, block_size=4, async_scheduling=True)
    scheduler = Scheduler(config)
    scheduler.add(Request(0, Prompt([1]), 5, frozenset({7})))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert scheduler.commit(first, [7]).finished
    with pytest.raises(RequestRejected, match="duplicate_id"):
        scheduler.add(Request(0, Prompt([1]), 5))
    scheduler.add(Request(1, Prompt([1]), 5))
    scheduler.commit(second, [8])
    scheduler.add(Request(0, Prompt([1]), 5))
    assert scheduler.waiting_ids() == [1, 0]
    assert scheduler.schedule().step == 2


def test_prompts_of_unequal_priority() -> None:
    for seed in (*range(60), *range(700, 760)):
        run_workload(crowded_prompts(seed))


def test_prompts_of_unequal_priority_in_other_modes() -> None:
    for seed in range(400):
        run_workload(crowded_otherwise(seed))


def test_priority_with_everything_else() -> None:
    for seed in range(120):
        run_workload(random_workload(seed, "priority", is_async=seed % 3 == 0))


def test_equal_priorities_go_by_the_callers_clock() -> None:
    config = KernelConfig(num_blocks=4, max_model_len=16, block_size=4, policy="priority")
    scheduler = Scheduler(config)
    for name, arrival in ((0, 30), (1, 10), (2, None), (3, 20)):
        scheduler.add(Request(name, Prompt([1]), 2, arrival=arrival))
    assert scheduler.waiting_ids() == [2, 1, 3, 0]
    assert [scheduler.state.sequences[name].arrival for name in range(4)] == [30, 10, 2, 20]


def test_decodes_that_are_passed_over_end_at_their_limits() -> None:
    for seed in range(30):
        run_workload(limits_out_of_order(seed))


@pytest.mark.parametrize("is_async", [False, True])
def test_prompts_that_are_held_back_in_small_pools(is_async: bool) -> None:
    for seed in range(160):
        options = {"prefill_schedule_interval": 2 + seed % 3, "max_num_seqs": 4}
        run_workload(with_options(seed, ("mixed", "priority")[seed % 2], is_async, **options))


def test_decodes_one_step_ahead_under_pressure() -> None:
    for seed in range(240):
        run_workload(under_pressure(seed))


@pytest.mark.parametrize("call", ["add", "abort", "schedule", "commit", "discard", "run_decode"])
def test_a_call_that_was_cut_short_is_named(call: str) -> None:
    """Whatever raises inside a call leaves a scheduler that says which call it was."""
    scheduler = Scheduler(KernelConfig(num_blocks=9, max_model_len=16, block_size=4))
    scheduler.add(Request(0, Prompt([1]), 9))
    if call in ("commit", "discard", "run_decode"):
        scheduler.commit(scheduler.schedule(), [1])
        plan = scheduler.schedule()
    calls: dict[str, Callable[[], object]] = {
        "add": lambda: scheduler.add(Request(1, Prompt([1]), 2)),
        "abort": lambda: scheduler.abort(0),
        "schedule": scheduler.schedule,
        "commit": lambda: scheduler.commit(plan, [1]),
        "discard": lambda: scheduler.discard(plan),
        "run_decode": lambda: scheduler.run_decode(plan, 1, lambda row: [1]),
    }
    scheduler.state.__class__ = _Interrupted
    is_early = call in ("add", "abort")
    scheduler.state.cut_at = ("waiting",) if is_early else ("manager", "decodes")  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="cut short"):
        calls[call]()
    with pytest.raises(SchedulerDead, match=rf"an earlier {call}\(\) was cut short"):
        scheduler.add(Request(2, Prompt([1]), 2))


class _Interrupted(KernelState):
    """Interrupts whoever works with some of its parts."""

    cut_at: tuple[str, ...] = ()

    def __getattribute__(self, name: str) -> object:
        if name in object.__getattribute__(self, "cut_at"):
            raise RuntimeError("cut short")
        return super().__getattribute__(name)


def test_limits_come_in_order_after_many_have_left() -> None:
    """The heap forgets those who left, now and then, and stays a heap."""
    decodes = DecodeSet(4)
    sequences = [
        Sequence(Request(name, Prompt([1]), 1), limit=200 - name * 37 % 101) for name in range(120)
    ]
    for place, sequence in enumerate(sequences):
        sequence.admission_index = place
        decodes.join(sequence, 2)
        if place % 3:
            decodes.leave(sequence)
            decodes.leave_batch(sequence)
    left = [sequence for sequence in sequences if sequence.decoding]
    assert len(decodes._limits) <= 2 * len(left) + 32
    ended: list[int] = []
    while left:
        assert decodes.next_limit() == min(sequence.limit for sequence in left) - 2
        decodes.advance(left[:1])
        sequence = left[0]
        assert sequence.base + decodes.clock <= sequence.limit
        at_limit = decodes.take_at_limit()
        assert all(one.base + decodes.clock == one.limit for one in at_limit)
        ended += [one.admission_index for one in at_limit]
        left = [one for one in left if one not in at_limit]
        if len(ended) > 20:
            break
    assert len(ended) > 20


def test_many_workloads() -> None:
    _run(range(100, 320))


def test_many_runs() -> None:
    for seed in range(100, 200):
        run_workload(fast_forward(seed))


def test_runs_while_prompts_are_held_back() -> None:
    for seed in range(200):
        workload = fast_forward(seed)
        if workload.config.policy == "prefill_first":
            continue
        config = replace(workload.config, prefill_schedule_interval=2 + seed % 2)
        run_workload(replace(workload, config=config))


def test_many_async_workloads() -> None:
    _run(range(100, 240), is_async=True)


PINNED_HASHES = [9525291143076145323, 1347466707746265295]
