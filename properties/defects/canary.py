"""The canary of the search: a defect that shows in about one workload in a hundred."""

from __future__ import annotations

from engine.core.config import KernelConfig
from engine.core.scheduler import Scheduler
from properties.defects.prefix_cache import KeepsStaleEntry


class RareStaleEntry(KeepsStaleEntry):
    """Stale cache entries, but only in pools of four blocks of 2 to 4 tokens."""


def rarely_stale(config: KernelConfig) -> Scheduler:
    """The kernel, except for one configuration in about fifty."""
    if config.num_blocks == 4 and config.block_size in (2, 3, 4):
        return RareStaleEntry(config)
    return Scheduler(config)
