"""The one signature behind which every attention backend sits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from engine.kernels.worklist import Worklist


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of one step read and write the paged KV cache.

    Rows are ordered: first `num_decodes` decodes (one token each), then the chunks' tokens, chunk
    after chunk. Decode tensors may be persistent buffers of a CUDA graph; nothing here is changed.
    """

    slot_mapping: Tensor  # int64 [num_tokens]; -1 marks a padded row, which is not written
    num_decodes: int
    decode_block_tables: Tensor  # int32 [num_decodes, max_blocks]
    decode_context_lens: Tensor  # int32 [num_decodes]; counts the token computed now, 0 if padded
    max_decode_context: int  # host-side upper bound, constant under a graph
    cu_seqlens_q: Tensor | None = None  # int32 [num_chunks + 1], relative to the first chunk token
    chunk_block_tables: Tensor | None = None  # int32 [num_chunks, max_blocks]
    chunk_context_lens: Tensor | None = None  # int32 [num_chunks]; keys, this chunk included
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    # Filled in by `AttentionBackend.prepare`, for itself.
    decode_order: Tensor | None = None  # int64 [num_decodes]
    cu_seqlens_k: Tensor | None = None  # int32 [num_chunks + 1]
    # In place of all bounds and lengths above, for a backend that reads them on the device.
    work: Worklist | None = None

    @property
    def num_chunks(self) -> int:
        """Chunks of prompts in this step."""
        return 0 if self.chunk_context_lens is None else self.chunk_context_lens.shape[0]


class AttentionBackend(Protocol):
    """Writes the step's keys and values into the cache, then attends over it, causally."""

    @property
    def name(self) -> str:
        """The word users select the backend by."""
        ...

    def check(
        self, head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise ConfigError if this backend cannot serve these sizes; called once at start."""
        ...

    def prepare(self, meta: AttentionMetadata) -> AttentionMetadata:
        """What all layers of a step share, worked out once; called at the start of a forward."""
        ...

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        kv_cache: Tensor,
        meta: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        """Attention output [T, Hq, D] for q [T, Hq, D] and k, v [T, Hkv, D].

        `kv_cache` is [2, blocks, block_size, Hkv, D] (keys, values; may be a strided view). With
        k and v None the caller's fused kernel has already written this step's KV.
        """
        ...
