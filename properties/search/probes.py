"""Laws that no single run shows: each probe runs the kernel several times, or looks inside it."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from engine.core.config import KernelConfig
from engine.core.errors import ConfigError, KernelBug
from engine.core.hashing import ChainNode, PrefixIndex
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.tokens import Prompt, content_of
from properties.follower.view import LawBroken
from properties.search.run import Factory, kernel, run_workload
from properties.search.workloads import Workload, random_workload

SchedulerFactory = Callable[[KernelConfig], Scheduler]


def _small(**changes: Any) -> KernelConfig:  # noqa: ANN401
    base = KernelConfig(num_blocks=8, max_model_len=64, block_size=4, max_num_batched_tokens=16)
    return replace(base, **changes)


def _require_service(scheduler: Scheduler) -> None:
    """One request of one token is served to its end; else what follows would prove nothing."""
    scheduler.add(Request("served", Prompt([1, 2, 3]), 1))
    plan = scheduler.schedule()
    finished = scheduler.commit(plan, [4] * len(plan.sampled_ids)).finished
    told = [(ended.request_id, ended.reason, list(ended.output_token_ids)) for ended in finished]
    if told != [("served", "length", [4])]:
        raise LawBroken("L6", f"a request of one token ended as {told}")


def double_free(factory: SchedulerFactory = Scheduler) -> None:
    """LAW-B9: freeing a sequence twice changes nothing, freeing a block twice raises."""
    scheduler = factory(_small())
    _require_service(scheduler)
    scheduler.add(Request(0, Prompt([1, 2, 3, 4, 5]), 4))
    scheduler.commit(scheduler.schedule(), [7])
    sequence = scheduler.state.sequences[0]
    table = list(sequence.block_table)
    scheduler.state.manager.release(sequence)
    before = scheduler.free_order()
    scheduler.state.manager.release(sequence)
    if scheduler.free_order() != before:
        raise LawBroken("B9", "a second release of a sequence changed the free queue")
    try:
        scheduler.state.manager.pool.release(table)
    except KernelBug as bug:
        if bug.law != "B9" or str(table[-1]) not in bug.detail:
            raise LawBroken("B9", f"a second release of {table} is reported as {bug}") from bug
        return
    raise LawBroken("B9", "a second release of the same blocks went unnoticed")


def round_trip(factory: SchedulerFactory = Scheduler) -> None:
    """LAW-B10: allocating for a request and letting go of it restores the sets and the counts."""
    for policy in ("mixed", "prefill_first"):
        for length in range(1, 20):
            scheduler = factory(_small(policy=policy))
            _require_service(scheduler)
            scheduler.add(Request("held", Prompt(range(6)), 8))
            scheduler.commit(scheduler.schedule(), [90])
            pool = scheduler.state.manager.pool
            free, refs = set(scheduler.free_order()), [pool.ref_count(b) for b in range(8)]
            scheduler.add(Request("passing", Prompt(range(length)), 4))
            plan = scheduler.schedule()
            scheduler.abort("passing")
            scheduler.commit(plan, [91] * len(plan.sampled_ids))
            grown = len(scheduler.block_table("held"))
            if grown != 2:
                raise LawBroken("B10", f"the bystander holds {grown} blocks")
            after = [pool.ref_count(b) for b in range(8)]
            if set(scheduler.free_order()) != free or after != refs:
                raise LawBroken("B10", f"prompt of {length}: refs {refs} became {after}")


# The hashes of [0, 1, 2], [3, 4, 5] behind no extra key; they may never change silently, since
# step logs and prefix-affine routers of different processes compare them.
_EXTRA = (("salt", "x"),)


def _chain(index: PrefixIndex, keys: tuple[tuple[str, str], ...]) -> list[ChainNode]:
    node = index.root(keys)
    chain = []
    for start in (0, 3):
        node = index.intern(node, content_of(array("q", range(start, start + 3))))
        node.ref_count += 1
        chain.append(node)
    return chain


def chain_of(index: PrefixIndex) -> list[ChainNode]:
    """The nodes of that chain in an index."""
    return _chain(index, _EXTRA)


def chain_hashes(index_class: type[PrefixIndex] = PrefixIndex) -> list[int]:
    """The hashes of one chain, for comparison between processes."""
    return [node.hash for node in chain_of(index_class(64))]


def hash_chain(index_class: type[PrefixIndex] = PrefixIndex) -> None:
    """LAW-K2: equal chains have equal hashes; other prefixes or typed keys have others."""
    index = index_class(64)
    plain, again = _chain(index, ()), _chain(index, ())
    if any(one is not other for one, other in zip(plain, again, strict=True)):
        raise LawBroken("K2", "one chain has two keys")
    seen = {id(node) for node in plain}
    for keys in ((("salt", "x"),), (("adapter", "x"),), (("salt", "x"), ("adapter", "x"))):
        for node in _chain(index, keys):
            if id(node) in seen:
                raise LawBroken("K2", f"extra keys {keys} share a key with others")
            seen.add(id(node))
    moved = index.intern(plain[1], content_of(array("q", range(3))))
    if moved is plain[0] or moved.hash == plain[0].hash:
        raise LawBroken("K2", "a block has the same key behind another prefix")
    if index_class(64).root(()) is None or chain_hashes(index_class) != chain_hashes(index_class):
        raise LawBroken("K2", "two indexes give one chain different hashes")


def hash_across_processes() -> None:
    """LAW-K2, LAW-S11: another process gets the same hashes and decisions."""
    program = (
        "from properties.search.probes import chain_hashes, decisions;"
        "print(chain_hashes(), [decisions(seed) for seed in range(20)])"
    )
    outputs = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        outputs.add(done.stdout)
    if len(outputs) != 1:
        raise LawBroken("S11", "two processes decide differently")


def decisions(seed: int, factory: Factory = kernel) -> list[Any]:
    """Every decision of a workload."""
    told: list[Any] = []

    class Recorder:
        def __init__(self, config: KernelConfig) -> None:
            self._inner = factory(config)

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401
            return getattr(self._inner, name)

        def schedule(self) -> Any:  # noqa: ANN401
            plan = self._inner.schedule()
            told.append((list(plan.entries), plan.new_blocks, plan.preempted))
            return plan

    workload = random_workload(seed)
    operations = tuple(op for op in workload.operations if op[0] != "run")
    plain = Workload(workload.config, workload.vocabulary, operations)
    run_workload(plain, Recorder, only=frozenset(), thorough=False)
    return told


def determinism(factory: Factory = kernel) -> None:
    """LAW-S11: the same calls give the same decisions, whatever ran before in this process."""
    for seed in range(30):
        if decisions(seed, factory) != decisions(seed, factory):
            raise LawBroken("S11", f"workload {seed} is decided in two ways")


def impossible_configs(config_class: Callable[..., Any] = KernelConfig) -> None:
    """LAW-C2: impossible values are refused at construction; more seats than budget are legal."""
    good: dict[str, Any] = {"num_blocks": 4, "max_model_len": 16}
    config_class(**good, max_num_seqs=64, max_num_batched_tokens=2)
    for option in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"):
        for value in (0, -1, 2.5, None):
            try:
                config_class(**{**good, option: value})
            except ConfigError as error:
                if error.option != option or error.value != value:
                    raise LawBroken("C2", f"{option}={value!r} is refused as {error}") from error
                continue
            raise LawBroken("C2", f"{option}={value!r} was accepted")


def _outputs(config: KernelConfig, specs: list[dict[str, Any]], factory: Factory) -> dict[Any, Any]:
    operations: list[list[Any]] = []
    for spec in specs:
        operations += [["add", spec], ["step"]]
    workload = Workload(config, 5, (*operations, ["drain"]))
    follower = run_workload(workload, factory, only=frozenset(), thorough=False)
    outputs = follower.ledger.outputs
    for spec in specs:
        if not outputs.get(spec["id"]):
            raise LawBroken("L7", f"request {spec['id']!r} returned no output under {config}")
    return outputs


def chunk_independence(factory: Factory = kernel) -> None:
    """LAW-E2: chunked prefill gives the outputs of unchunked, at all lengths around k blocks."""
    for policy in ("mixed", "prefill_first"):
        for length in (1, 3, 4, 5, 7, 8, 9, 11, 12, 13):
            spec = {"id": 0, "prompt": [i % 5 for i in range(length)], "max_tokens": 4}
            whole = _outputs(_small(policy=policy, max_num_batched_tokens=64), [spec], factory)
            for budget in range(1, length + 1):
                config = _small(policy=policy, max_num_batched_tokens=budget)
                if _outputs(config, [spec], factory) != whole:
                    raise LawBroken("E2", f"{policy}: budget {budget} changes prompt {length}")


def _settings(base: KernelConfig) -> Iterator[KernelConfig]:
    for policy in ("mixed", "prefill_first"):
        for caching in (True, False):
            for blocks in (6, 8, 40):
                for seats in (1, 2, 8):
                    yield replace(
                        base,
                        policy=policy,
                        enable_prefix_caching=caching,
                        num_blocks=blocks,
                        max_num_seqs=seats,
                    )


def output_independence(factory: Factory = kernel) -> None:
    """LAW-E3: outputs do not depend on pool, seats, cache, policy, hash width or order."""
    specs = [
        {"id": i, "prompt": [0, 1, 2, 3] * (1 + i % 3) + [i % 5] * (1 + i), "max_tokens": 6}
        for i in range(4)
    ]
    expected = _outputs(_small(num_blocks=40), specs, factory)
    for config in _settings(_small(max_num_batched_tokens=6)):
        for hash_bits, order in ((64, 1), (1, 1), (64, -1)):
            chosen = replace(config, hash_bits=hash_bits)
            if _outputs(chosen, specs[::order], factory) != expected:
                raise LawBroken("E3", f"other outputs with {chosen}")


def alarm(probe: Callable[..., None], *args: Any) -> LawBroken | None:  # noqa: ANN401
    """What a probe says about a defect, or None."""
    try:
        probe(*args)
    except LawBroken as broken:
        return broken
    return None
