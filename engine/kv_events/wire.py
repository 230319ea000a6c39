"""The messages, in msgpack, as subscribers of vLLM 0.33.0 decode them.

A batch is an array, an event a map whose `type` is the name of its class; what has its default is
left out. Fields that have no counterpart here (LoRA, tiers, sessions) are never written.
"""

from __future__ import annotations

import msgspec

# 64 bits as an integer, or the whole digest.
BlockHash = int | bytes

MEDIUM = "GPU"
SPEC_KIND = "full_attention"


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Consecutive blocks that can be hit from now on; `token_ids` are those of all of them."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that are gone; of several copies of one block each is removed once."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """The prefix cache is empty."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of one step; `ts` in seconds since 1970."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None
