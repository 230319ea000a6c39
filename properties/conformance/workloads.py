"""Workloads with only what an adapter can do; every fourth keeps prompts arriving."""

from __future__ import annotations

from random import Random
from typing import Any

from engine.core.config import KernelConfig
from properties.conformance.options import configured
from properties.search.driver import Operation
from properties.search.workloads import Workload, random_workload

_NOT_FOR_ADAPTERS = ("keys", "min_tokens", "priority")


def adapter_workload(seed: int, adapter: Any) -> Workload:  # noqa: ANN401
    """The workload of a seed.

    Raises:
        AdapterProblem: the adapter's options are impossible.
    """
    is_async = bool(getattr(adapter, "asynchronous", False))
    drawn = random_workload(seed, adapter.policy, is_async)
    options = dict(adapter.kernel_options)
    if hasattr(adapter, "weaken_hash"):
        options.setdefault("hash_bits", (drawn.config.hash_bits,))
    options.setdefault("async_scheduling", is_async)
    config = configured(drawn.config, options, seed)
    if seed % 4 == 3:
        return Workload(config, drawn.vocabulary, _arriving(seed, config, drawn.vocabulary))
    # An abort takes effect with the open step; an adapter has no way to say so.
    can_abort = hasattr(adapter, "abort") and not is_async
    operations: list[Operation] = []
    for operation in drawn.operations:
        name = operation[0]
        if name == "add":
            spec = {k: v for k, v in operation[1].items() if k not in _NOT_FOR_ADAPTERS}
            # Every id once: not every scheduler lets an id be used again.
            fresh = {"id": sum(made[0] == "add" for made in operations)}
            operations.append(["add", {**spec, **fresh}])
        elif (
            name == "drain"
            or (name == "abort" and can_abort)
            or (name in ("open", "close") and is_async)
        ):
            operations.append(operation)
        elif name not in ("abort", "open"):
            operations.append(["step"])
    return Workload(config, drawn.vocabulary, tuple(operations))


def _arriving(seed: int, config: KernelConfig, vocabulary: int) -> tuple[Operation, ...]:
    """One or two long outputs, and then a short prompt before every step."""
    rng = Random(f"arriving {seed}")
    room = max(1, min(config.max_model_len - 2, config.num_blocks * config.block_size // 2))
    operations: list[Operation] = []
    for name in range(rng.randint(1, 2)):
        prompt = [rng.randrange(vocabulary) for _ in range(rng.randint(1, min(4, room)))]
        outputs = max(1, min(rng.randint(8, 16), room - len(prompt)))
        operations += [["add", {"id": name, "prompt": prompt, "max_tokens": outputs}], ["step"]]
    for name in range(2, 2 + rng.randint(4, 12)):
        prompt = [rng.randrange(vocabulary) for _ in range(rng.randint(1, min(6, room)))]
        spec = {"id": name, "prompt": prompt, "max_tokens": rng.randint(1, 2)}
        operations += [["add", spec], ["step"]]
    return (*operations, ["drain"])
