"""Random small workloads: one seed gives one configuration and one list of operations.

Everything is small on purpose: tiny pools, blocks and vocabularies reach more states per second
than large ones, and a failure is readable.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from engine.core.config import KernelConfig
from properties.search.driver import Operation


@dataclass(frozen=True, slots=True)
class Workload:
    """A configuration, the vocabulary of the fake model, and what happens."""

    config: KernelConfig
    vocabulary: int
    operations: tuple[Operation, ...]


# Share of workloads in which an event may happen at all (swarm testing).
_EVENTS = {"abort": 0.4, "open": 0.4, "discard": 0.3, "run": 0.1, "reuse": 0.2}
# How often each policy is drawn.
_POLICIES = ("mixed", "mixed", "prefill_first", "prefill_first", "priority")


def random_workload(seed: int, policy: str | None = None, is_async: bool = False) -> Workload:
    """The workload of a seed."""
    rng = Random(seed)
    config = random_config(rng, policy or rng.choice(_POLICIES), is_async)
    vocabulary = rng.choice((2, 3, 5))
    events = tuple(event for event, share in _EVENTS.items() if rng.random() < share)
    return Workload(config, vocabulary, tuple(_operations(rng, config, vocabulary, events)))


def random_config(rng: Random, policy: str, is_async: bool = False) -> KernelConfig:
    """A small configuration; options that belong to the other policy stay at their defaults."""
    uniform, randint = rng.random, rng.randint
    block_size = rng.choice((1, 2, 2, 3, 4, 4, 8, 16))
    num_blocks = randint(2, 12)
    options: dict[str, Any] = {}
    if policy != "prefill_first":
        if uniform() < 0.25:
            options["long_prefill_token_threshold"] = randint(1, 6)
            options["long_prefill_token_threshold_adaptive"] = uniform() < 0.2
            options["threshold_when_alone"] = uniform() < 0.2
        if uniform() < 0.1:
            options["max_num_active_seqs"] = 1
        if uniform() < 0.1:
            options["prefill_schedule_interval"] = randint(2, 4)
        if uniform() < 0.25:
            options["watermark_blocks"] = randint(1, 3)
        if uniform() < 0.2:
            options["reserve_full_prompt"] = False
    else:
        if uniform() < 0.2:
            options["bound_holders"] = False
        if uniform() < 0.2:
            options["bound_decode_tokens"] = False
        if uniform() < 0.2:
            options["bound_model_len"] = False
    if uniform() < 0.3:
        options["hash_bits"] = randint(1, 8)
    capacity = num_blocks * block_size
    return KernelConfig(
        num_blocks=num_blocks,
        max_model_len=max(2, randint(2, capacity + 4)) if uniform() < 0.3 else capacity + 4,
        block_size=block_size,
        max_num_seqs=rng.choice((1, 2, 2, 3, 4, 8)),
        max_num_batched_tokens=rng.choice((1, 2, 3, 4, 6, 8, 12, 16, 32, 64)),
        policy=policy,
        enable_prefix_caching=uniform() < 0.85,
        async_scheduling=is_async,
        **options,
    )


def _operations(
    rng: Random, config: KernelConfig, vocabulary: int, events: tuple[str, ...]
) -> list[Operation]:
    # Most workloads are tiny, because more of them fit into a second.
    tiny = rng.random() < 0.6
    count = rng.choice((1, 2, 2, 3)) if tiny else rng.choice((2, 3, 3, 4, 5, 6))
    prefixes = [_tokens(rng, vocabulary, 3 * config.block_size + 1) for _ in range(2)]
    operations: list[Operation] = []
    for request_id in range(count):
        spec = random_request(rng, request_id, config, vocabulary, prefixes)
        if tiny:
            spec["max_tokens"] = min(spec["max_tokens"], 4)
            spec["min_tokens"] = min(spec.get("min_tokens", 0), spec["max_tokens"])
        if "reuse" in events and rng.random() < 0.3:
            spec["id"] = rng.randrange(request_id + 1)
        operations.append(["add", spec])
        if config.async_scheduling and rng.random() < 0.5:
            operations.append(["open"])  # from here on each step is decided one ahead
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 4))):
            draw = rng.random()
            if "abort" in events and draw < 0.15:
                operations.append(["abort", rng.randint(0, request_id)])
            elif "open" in events and draw < 0.4:
                operations.append(["open"])
                if "abort" in events and draw < 0.3:
                    operations.append(["abort", rng.randint(0, request_id)])
                if "discard" in events and draw < 0.22:
                    operations.append(["discard"])
                elif draw < 0.32:
                    operations.append(["close"])
            elif "run" in events and draw < 0.6:
                operations.append(["run", rng.randint(0, 7)])
            else:
                operations.append(["step"])
    if "run" in events:
        operations += [["run", rng.randint(0, 7)] for _ in range(count)]
    operations.append(["drain"])
    return operations


def random_request(
    rng: Random,
    request_id: int,
    config: KernelConfig,
    vocabulary: int,
    prefixes: list[list[int]],
) -> dict[str, Any]:
    """An add operation's request: often a shared prefix of about k blocks, then its own tail."""
    size = config.block_size
    longest = max(1, min(config.num_blocks * size, config.max_model_len - 1, 24))
    if rng.random() < 0.7:
        length = rng.randint(1, 3) * size + rng.choice((-1, 0, 0, 1))
        prompt = prefixes[rng.random() < 0.25][: max(1, length)]
        if rng.random() < 0.4:
            prompt = prompt + _tokens(rng, vocabulary, rng.randint(1, size + 1))
    else:
        prompt = _tokens(rng, vocabulary, rng.randint(1, 10))
    if rng.random() < 0.97:
        prompt = prompt[:longest]
    room = max(1, config.num_blocks * size - len(prompt) + 1)
    outputs = rng.randint(1, 9) if rng.random() < 0.8 else rng.randint(1, 3 * size + 4)
    spec: dict[str, Any] = {
        "id": request_id,
        "prompt": prompt,
        "max_tokens": outputs if rng.random() < 0.03 else min(outputs, room),
    }
    if rng.random() < 0.4:
        spec["stops"] = [rng.randrange(vocabulary)]
        if rng.random() < 0.2:
            spec["min_tokens"] = rng.randint(1, spec["max_tokens"])
    if rng.random() < 0.1:
        spec["keys"] = [[rng.choice(("salt", "adapter")), "x"]]
    if config.policy == "priority":
        spec["priority"] = rng.choice((0, 0, 1, 2))
    if rng.random() < 0.3:
        spec["seed"] = rng.randint(1, 3)
    return spec


def _tokens(rng: Random, vocabulary: int, count: int) -> list[int]:
    return [int(rng.random() * vocabulary) for _ in range(count)]


def crowded_prompts(seed: int) -> Workload:
    """Long, half-done prompts of unequal priority that take each other's blocks in one step."""
    rng = Random(seed)
    size, num_blocks = rng.choice((1, 2, 2, 3)), rng.randint(5, 10)
    chunk = rng.randint(size, 3 * size)
    config = KernelConfig(
        num_blocks=num_blocks,
        max_model_len=num_blocks * size + 4,
        block_size=size,
        max_num_seqs=4,
        max_num_batched_tokens=rng.randint(2 * chunk, 4 * chunk),
        policy="priority",
        long_prefill_token_threshold=chunk,
        reserve_full_prompt=False,
    )
    operations: list[Operation] = []
    shared = _tokens(rng, 3, num_blocks * size)
    for request_id in range(rng.randint(3, 4)):
        length = rng.randint(2 * size, max(2 * size, num_blocks * size - 3))
        prompt = shared[:length] if rng.random() < 0.9 else _tokens(rng, 3, length)
        spec = {"id": request_id, "prompt": prompt, "max_tokens": rng.randint(1, 4)}
        operations.append(["add", {**spec, "priority": rng.choice((0, 1, 2, 3))}])
        operations += [["step"]] * rng.choice((0, 0, 1, 2))
    return Workload(config, 3, (*operations, ["drain"]))
