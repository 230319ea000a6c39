"""Workloads as bytes, and their random changes: what libFuzzer keeps and goes on from."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

from engine.core.config import KernelConfig
from properties.search.driver import Operation
from properties.search.workloads import Workload, random_config, random_request, random_workload

CORPUS = Path(__file__).with_name("corpus.jsonl")
MOST_OPERATIONS = 60
_PLAIN = (["step"], ["step"], ["open"], ["close"], ["discard"], ["drain"])


def encode(workload: Workload) -> bytes:
    """One line of JSON; options at their defaults are left out."""
    default = asdict(KernelConfig(num_blocks=1, max_model_len=2))
    given = asdict(workload.config)
    config = {name: value for name, value in given.items() if value != default.get(name)}
    config |= {name: given[name] for name in ("num_blocks", "max_model_len")}
    parts = [config, workload.vocabulary, list(workload.operations)]
    return json.dumps(parts, separators=(",", ":")).encode()


def decode(data: bytes) -> Workload:
    """The workload of a line.

    Raises:
        ValueError, TypeError, KeyError, LookupError: it is none.
    """
    config, vocabulary, operations = json.loads(data)
    return Workload(KernelConfig(**config), vocabulary, tuple(operations))


def corpus() -> list[bytes]:
    """The kept lines."""
    return CORPUS.read_bytes().splitlines()


def mutated(workload: Workload, rng: Random, other: Workload | None = None) -> Workload:
    """A neighbour: some operations or requests changed, or the configuration."""
    operations = [_copied(operation) for operation in workload.operations]
    config, vocabulary = workload.config, workload.vocabulary
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind = rng.random()
        if kind < 0.15:
            config = _other_config(config, rng)
        elif kind < 0.3 and other is not None:
            cut = rng.randrange(len(other.operations) + 1)
            operations = operations[: rng.randrange(len(operations) + 1)]
            operations += [_copied(operation) for operation in other.operations[cut:]]
        elif kind < 0.5 and operations:
            del operations[rng.randrange(len(operations))]
        elif kind < 0.65 and any(operation[0] == "add" for operation in operations):
            adds = [operation for operation in operations if operation[0] == "add"]
            _change_request(rng.choice(adds)[1], rng, vocabulary)
        else:
            place = rng.randrange(len(operations) + 1)
            operations.insert(place, _operation(rng, config, vocabulary, operations))
    return Workload(config, vocabulary, tuple(operations[:MOST_OPERATIONS]))


def _copied(operation: Operation) -> Operation:
    return [dict(part) if isinstance(part, dict) else part for part in operation]


def _other_config(config: KernelConfig, rng: Random) -> KernelConfig:
    """One option as a random configuration has it; all of them now and then."""
    drawn = random_config(rng, config.policy, config.async_scheduling)
    if rng.random() < 0.1:
        return random_workload(rng.getrandbits(32), is_async=rng.random() < 0.5).config
    name = rng.choice([*asdict(config)])
    return KernelConfig(**{**asdict(config), name: getattr(drawn, name)})


def _operation(
    rng: Random, config: KernelConfig, vocabulary: int, operations: list[Operation]
) -> Operation:
    ids = [operation[1]["id"] for operation in operations if operation[0] == "add"]
    draw = rng.random()
    if draw < 0.25:
        name = rng.choice(ids) if ids and rng.random() < 0.2 else len(ids)
        prefixes = [[place % vocabulary for place in range(3 * config.block_size)]] * 2
        return ["add", random_request(rng, name, config, vocabulary, prefixes)]
    if draw < 0.35 and ids:
        return ["abort", rng.choice(ids)]
    if draw < 0.45:
        return ["run", rng.randint(0, 7)]
    return list(rng.choice(_PLAIN))


def _change_request(spec: dict[str, Any], rng: Random, vocabulary: int) -> None:
    kind = rng.randrange(5)
    if kind == 0:
        spec["prompt"] = spec["prompt"] + [rng.randrange(vocabulary)] * rng.randint(1, 4)
    elif kind == 1 and len(spec["prompt"]) > 1:
        spec["prompt"] = spec["prompt"][: rng.randint(1, len(spec["prompt"]) - 1)]
    elif kind == 2:
        spec["max_tokens"] = rng.randint(1, 12)
        spec.pop("min_tokens", None)
    elif kind == 3:
        spec["stops"] = [rng.randrange(vocabulary)]
    else:
        spec["priority"] = rng.randint(0, 3)
