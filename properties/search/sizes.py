"""LAW-L11: nothing that is kept may grow with the steps and requests that have passed.

The walk knows no container by name, so one that is added later is judged too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from enum import Enum
from random import Random
from types import FunctionType, MethodType, ModuleType
from typing import Any

from engine.core.config import KernelConfig
from engine.core.request import Request, RequestId
from engine.core.scheduler import Scheduler
from engine.core.tokens import Prompt
from properties.follower.view import LawBroken
from properties.search.run import Factory, kernel

# What a caller hands in, and what has no contents of its own.
_LEAVES = (
    type, FunctionType, MethodType, ModuleType, Enum, str, bytes, int, float, complex, range,
    type(None), Prompt, Request, KernelConfig,
)  # fmt: skip
NUM_STEPS = 1200
VOCABULARY = 12


def sizes_of(root: object, skip: tuple[type, ...] = ()) -> Counter[str]:
    """Items of all containers reachable from `root`, summed by the attribute that leads there."""
    found: Counter[str] = Counter()
    seen: dict[int, object] = {}  # also keeps what is made on the way alive, so that ids stay
    queue: deque[tuple[str, object]] = deque([(type(root).__name__, root)])
    while queue:
        path, value = queue.popleft()
        if isinstance(value, (*_LEAVES, *skip)) or id(value) in seen:
            continue
        seen[id(value)] = value
        if hasattr(value, "__len__") and hasattr(value, "__iter__"):
            found[path] += len(value)
        queue.extend(_held(path, value))
    return found


def _held(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield path, key
            yield path, item
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for item in value:
            yield path, item
    names = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())}
    names |= set(getattr(value, "__dict__", ()))
    for name in sorted(names):
        if hasattr(value, name):
            yield f"{type(value).__name__}.{name}", getattr(value, name)


def bounded(root: object, bound: int, law: str, skip: tuple[type, ...] = ()) -> None:
    """Raises LawBroken if the containers behind any attribute hold more items than `bound`."""
    for path, items in sizes_of(root, skip).items():
        if items > bound:
            raise LawBroken(law, f"{path} holds {items} items, more than {bound}")


def kernel_bound(scheduler: Scheduler) -> int:
    """Items that live requests, their tokens and the blocks can account for."""
    sequences = scheduler.state.sequences.values()
    tokens = sum([sequence.num_tokens for sequence in sequences])
    config = scheduler.config
    return 2 * (tokens + len(sequences) + config.num_blocks + config.block_size) + 200


def long_run(factory: Factory = kernel) -> None:
    """LAW-L11: a long run of few requests at a time leaves every container small."""
    for number, config in enumerate(_configs()):
        _churn(factory, config, Random(number))


def _configs() -> Iterator[KernelConfig]:
    """Held-back decodes, preemptions and caching in all policies and modes."""
    for policy in ("mixed", "prefill_first", "priority"):
        for is_async in (False, True):
            budget = {"max_num_batched_tokens": 3}  # fewer than decodes
            spread = {"long_prefill_token_threshold": 4, "watermark_blocks": 1}
            for options in (budget, {} if policy == "prefill_first" else spread):
                sizes = {"num_blocks": 14, "block_size": 16, "max_num_seqs": 6}
                yield KernelConfig(
                    **{**sizes, "max_num_batched_tokens": 64, **options},  # type: ignore[arg-type]
                    max_model_len=200,
                    policy=policy,
                    async_scheduling=is_async,
                )


def _churn(factory: Factory, config: KernelConfig, rng: Random) -> None:
    scheduler: Any = factory(config)
    names = iter(range(10**9))
    for step in range(NUM_STEPS):
        while len(scheduler.state.sequences) < 7:
            scheduler.add(_request(next(names), rng))
        _one_step(scheduler, rng)
        if step % 100 == 99:
            bounded(scheduler, kernel_bound(scheduler), "L11")


def _request(name: RequestId, rng: Random) -> Request:
    length = rng.choice((1, 3, 17, 40))
    return Request(
        name,
        Prompt([rng.randrange(VOCABULARY) for _ in range(length)]),
        rng.choice((2, 150)),
        frozenset({0}),
        extra_keys=(("salt", str(name)),) if rng.random() < 0.5 else (),
        priority=rng.choice((0, 1)),
    )


def _one_step(scheduler: Any, rng: Random) -> None:  # noqa: ANN401
    if scheduler.has_work and len(scheduler.open_plans) <= scheduler.config.async_scheduling:
        scheduler.schedule()
    if rng.random() < 0.02:
        scheduler.abort(rng.choice([*scheduler.state.sequences]))
    if len(scheduler.open_plans) > scheduler.config.async_scheduling or not scheduler.has_work:
        plan = scheduler.open_plans[0]
        if rng.random() < 0.01:
            scheduler.discard(plan)
        else:
            scheduler.commit(plan, [rng.randrange(VOCABULARY) for _ in plan.sampled_ids])
