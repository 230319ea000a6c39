"""Ways to be served that must not change what is computed, each proven to have occurred."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from engine.core import KernelConfig, Scheduler
from golden.cases import ForcedSequence
from golden.forced import Events, drive

# Positions of the prompts that every way is tried with; more would tell nothing new.
WAY_POSITIONS = 640
SMALL_BUDGET = 37  # no divisor of any block size, so chunks end inside blocks


@dataclass(frozen=True, slots=True)
class Way:
    """One way; `hit` runs everything twice and looks at the second time."""

    name: str
    alone: bool = False
    chunked: bool = False
    preempted: bool = False
    hit: bool = False


WAYS = (
    Way("one request at a time", alone=True),
    Way("many requests in a step"),
    Way("prompts in small chunks", chunked=True),
    Way("preempted and computed again", preempted=True),
    Way("prefixes from the cache", hit=True),
)


def way_sequences(sequences: Sequence[ForcedSequence]) -> list[ForcedSequence]:
    """Short prompts of every kind, as many as `WAY_POSITIONS` allows, the longest of them first."""
    chosen: list[ForcedSequence] = []
    total = 0
    for item in sorted(sequences, key=lambda item: abs(item.num_logits - 90)):
        if chosen and total + item.num_logits > WAY_POSITIONS:
            continue
        chosen.append(item)
        total += item.num_logits
    return sorted(chosen, key=lambda item: -len(item.prompt))


def way_changes(
    config: KernelConfig, way: Way, sequences: Sequence[ForcedSequence]
) -> dict[str, object] | None:
    """What the kernel's configuration must be for a way; None where no pool preempts."""
    changes: dict[str, object] = {"enable_prefix_caching": way.hit}
    if way.chunked:
        changes["max_num_batched_tokens"] = min(SMALL_BUDGET, config.max_num_batched_tokens)
    if way.preempted:
        pool = _preempting_pool(replace(config, enable_prefix_caching=False), sequences)
        if pool is None:
            return None
        changes["num_blocks"] = pool
        changes["max_model_len"] = min(config.max_model_len, pool * config.block_size)
    return changes


def unmet(way: Way, events: Iterable[Events]) -> str:
    """Which condition of a way did not occur; empty if all did."""
    seen = list(events)
    if way.chunked and not any(event.num_chunks > 1 for event in seen):
        return "no prompt is long enough for two chunks"
    if way.preempted and not any(event.num_preemptions for event in seen):
        return "nothing was preempted"
    if way.hit and not any(event.hit_tokens for event in seen):
        return "no prompt fills a block, so nothing can be found again"
    return ""


def _preempting_pool(config: KernelConfig, sequences: Sequence[ForcedSequence]) -> int | None:
    """The largest pool tried in which the kernel preempts, found without a model."""
    needed = [-(-(len(item.tokens) + 1) // config.block_size) for item in sequences]
    for pool in range(min(sum(needed), config.num_blocks), max(needed) - 1, -1):
        limit = min(config.max_model_len, pool * config.block_size)
        scheduler = Scheduler(replace(config, num_blocks=pool, max_model_len=limit))
        events = drive(scheduler, sequences, lambda _plan: None, checked=False)
        if any(event.num_preemptions for event in events.values()):
            return pool
    return None
