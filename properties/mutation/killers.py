"""The tests that mutmut runs against each mutant, cheapest first.

The name keeps pytest from collecting this file in ordinary runs, where longer suites do the same.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.core.config import KernelConfig
from engine.core.errors import KernelBug, RequestRejected
from engine.core.free_list import FreeList
from engine.core.hashing import PrefixIndex
from engine.core.request import Request
from engine.core.scheduler import Scheduler, StepOrderError
from engine.core.tokens import Prompt
from engine.core.views import UnknownRequest
from properties.defects.decisions import PausesWithFullQueue
from properties.search import probes
from properties.search.run import run_workload
from properties.search.workloads import Workload, random_workload


def _run(seeds: range, is_async: bool = False) -> None:
    for seed in seeds:
        run_workload(random_workload(seed, is_async=is_async))


def _fast_forward(seed: int) -> Workload:
    """A workload whose decodes are done in runs."""
    workload = random_workload(seed)
    operations: list[list[object]] = []
    for place, operation in enumerate(workload.operations[:-1]):
        operations.append(operation)
        if operation[0] == "add" and "stops" in operation[1] and seed % 4:
            operations[-1] = ["add", {k: v for k, v in operation[1].items() if k != "stops"}]
        if operation[0] in ("step", "add"):
            operations.append(["run", 7 + place * seed])
    operations += [["run", seed + i] for i in range(12)]
    return replace(workload, operations=(*operations, ["drain"]))


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


def late_prompts(budget: int, threshold: int) -> Workload:
    """Short prompts decode behind long ones that are still half done."""
    config = KernelConfig(
        num_blocks=64,
        max_model_len=64,
        block_size=2,
        max_num_seqs=6,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
    )
    operations: list[list[object]] = []
    for name, length in enumerate((14, 1, 9, 2, 1, 3)):
        spec = {"id": name, "prompt": [name + 3 * i for i in range(length)], "max_tokens": 7}
        operations += [["add", spec], ["step"]]
    return Workload(config, 5, (*operations, ["drain"]))


@pytest.mark.parametrize("budget", [2, 3, 4, 5, 6, 9])
def test_decodes_behind_half_done_prompts(budget: int) -> None:
    for threshold in (1, 2, 3):
        run_workload(late_prompts(budget, threshold))


def crowded_decodes(seed: int) -> Workload:
    """More decodes than the budget of a step, with blocks due anywhere and sometimes too few."""
    config = KernelConfig(
        num_blocks=(24, 9, 7, 6)[seed % 4],
        max_model_len=64,
        block_size=1 + seed % 3,
        max_num_seqs=6,
        max_num_batched_tokens=2 + seed % 2,
        policy="prefill_first",
    )
    operations: list[list[object]] = []
    for name in range(5):
        length = 1 + (seed // 2 + name) % 3
        spec = {"id": name, "prompt": [name + i for i in range(length)], "max_tokens": 2 + name % 4}
        operations += [["add", spec]]
    return Workload(config, 5, (*operations, ["drain"]))


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
        run_workload(_fast_forward(seed))


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
    with pytest.raises(UnknownRequest, match="no live request 5"):
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


def test_many_workloads() -> None:
    _run(range(100, 320))


def test_many_runs() -> None:
    for seed in range(100, 200):
        run_workload(_fast_forward(seed))


def test_many_async_workloads() -> None:
    _run(range(100, 240), is_async=True)


PINNED_HASHES = [9525291143076145323, 1347466707746265295]
