"""Workloads that bring the kernel into rare situations, for the killing tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.core.config import KernelConfig
from properties.search.driver import Operation
from properties.search.workloads import Workload, crowded_prompts, random_workload


def fast_forward(seed: int) -> Workload:
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


def limits_out_of_order(seed: int) -> Workload:
    """Decodes that are passed over, so that their limits come later than was foreseen."""
    config = KernelConfig(
        num_blocks=60,
        max_model_len=64,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=3 + seed % 3,
        policy=("prefill_first", "mixed")[seed % 2],
        enable_prefix_caching=False,
    )
    operations: list[list[object]] = []
    for name in range(8):
        spec = {"id": name, "prompt": [name], "max_tokens": 1 + (name * 5 + seed) % 13}
        operations.append(["add", spec])
        operations += [["step"] for _ in range(seed % 3)]
    operations += [["run", seed + 3], ["step"], ["run", 9]] * 4
    return Workload(config, 5, (*operations, ["drain"]))


def crowded_otherwise(seed: int) -> Workload:
    """Prompts of unequal priority that crowd each other out, in other modes."""
    workload = crowded_prompts(seed)
    changes: dict[str, Any] = (
        {"enable_prefix_caching": False},
        {"async_scheduling": True},
        {"prefill_schedule_interval": 2 + seed % 3},
        {"max_num_batched_tokens": workload.config.max_num_batched_tokens * 3},
    )[seed % 4]
    operations: list[Operation] = [
        ["open"] if op == ["step"] and seed % 3 == 0 else op for op in workload.operations
    ]
    longer: list[Operation] = [
        ["add", {**op[1], "max_tokens": 3 + (seed + place) % 7}] if op[0] == "add" else op
        for place, op in enumerate(operations)
    ]
    return replace(workload, config=replace(workload.config, **changes), operations=tuple(longer))


def with_options(seed: int, policy: str, is_async: bool, **options: object) -> Workload:
    """A random workload of a policy with some of its options fixed."""
    workload = random_workload(seed, policy, is_async=is_async)
    config = replace(workload.config, **options)  # type: ignore[arg-type]
    return replace(workload, config=config)


def under_pressure(seed: int) -> Workload:
    """Decodes one step ahead that preempt each other, in blocks that every token fills."""
    size = (1, 1, 2, 3)[seed % 4]
    config = KernelConfig(
        num_blocks=(24, 26, 13, 9)[seed % 4],
        max_model_len=64,
        block_size=size,
        max_num_seqs=4,
        max_num_batched_tokens=(4, 6, 32)[seed % 3],
        policy=("mixed", "prefill_first", "priority")[seed // 4 % 3],
        async_scheduling=True,
    )
    operations: list[list[object]] = []
    for name in range(4):
        prompt = [0] * (seed % 5) + [(name + i) % 3 for i in range(1 + (seed + name) % 5)]
        spec = {"id": name, "prompt": prompt, "max_tokens": 5 + (name + seed) % 9}
        if seed % 2:
            spec["stops"] = [4]
        if config.policy == "priority":
            spec["priority"] = (name * 7 + seed) % 3
        operations += [["add", spec], ["open"]]
        operations += [["step"] for _ in range((seed + name) % 3)]
        if seed % 7 == name:
            operations += [["abort", name // 2], ["step"]]
        if seed % 11 == name:
            operations += [["discard"]]
    return Workload(config, 5, (*operations, ["drain"]))
