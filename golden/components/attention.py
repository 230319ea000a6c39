"""Every attention backend against HF's attention: prefill, chunks, decodes and mixed steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionMetadata
from engine.attention.select import select_backend
from engine.core.errors import ConfigError
from golden.components.layers import GROUP, Place, component_result, normal
from golden.results import CaseResult, skipped
from golden.vector_rules import ErrorStats, three_way, worst_of


@dataclass(frozen=True, slots=True)
class Heads:
    """Head counts and size of one attention case."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


# (context, tokens computed now): decodes first, as in a step.
MODES: dict[str, tuple[tuple[int, int], ...]] = {
    "prefill": ((1, 1), (15, 15), (16, 16), (17, 17), (130, 130)),
    "chunk": ((33, 17), (64, 16), (300, 100), (257, 1)),
    "decode": ((1, 1), (2, 1), (16, 1), (17, 1), (255, 1), (256, 1), (300, 1)),
    "mixed": ((40, 1), (300, 1), (64, 64), (90, 31)),
}
HEADS = (Heads(8, 2, 64), Heads(4, 4, 48), Heads(16, 8, 128))
# FlashAttention is also built slim, without the small heads.
SMALL_HEADS = (Heads(4, 4, 32),)


def attention_results(
    backend_name: str, place: Place, block_sizes: tuple[int, ...]
) -> Iterator[CaseResult]:
    """Three-way results of one backend; sizes it cannot serve are listed as skipped."""
    cases = HEADS if backend_name == "flash_attn" else (*HEADS, *SMALL_HEADS)
    for block_size in block_sizes:
        label = f"attention {backend_name}, block {block_size}"
        try:
            backends = [
                select_backend(backend_name, heads.head_dim, block_size, place.dtype, place.device)
                for heads in cases
            ]
        except ConfigError as error:
            yield skipped(GROUP, f"{label} ({place.label})", str(error))
            continue
        for mode in MODES:
            parts = {
                f"{heads.num_heads}/{heads.num_kv_heads}x{heads.head_dim}": _compare(
                    backend, heads, block_size, mode, place
                )
                for backend, heads in zip(backends, cases, strict=True)
            }
            yield component_result(f"{label}, {mode}", place, worst_of(parts))


@torch.inference_mode()
def _compare(
    backend: AttentionBackend, heads: Heads, block_size: int, mode: str, place: Place
) -> ErrorStats:
    rows = MODES[mode]
    case = _Case(heads, block_size, rows, mode in ("decode", "mixed"), place)
    scale = heads.head_dim**-0.5
    q, k, v = case.new_tokens()
    out = backend.forward(q, k, v, case.cache, case.meta, scale)
    truth = torch.cat([case.reference(i, scale, torch.float32) for i in range(len(rows))])
    yardstick = torch.cat([case.reference(i, scale, place.dtype) for i in range(len(rows))])
    return three_way(out, truth, yardstick, place.dtype)


class _Case:
    """Sequences of random queries, keys and values, laid out in a paged cache out of order."""

    def __init__(
        self,
        heads: Heads,
        block_size: int,
        rows: tuple[tuple[int, int], ...],
        with_decodes: bool,
        place: Place,
    ) -> None:
        self.heads, self.rows, self.place = heads, rows, place
        self.num_decodes = sum(new == 1 for _, new in rows) if with_decodes else 0
        self.full = [self._sequence(seed, context) for seed, (context, _) in enumerate(rows)]
        columns = max(-(-context // block_size) for context, _ in rows)
        num_blocks = columns * len(rows)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3))
        self.tables = order.view(len(rows), columns)
        shape = (2, num_blocks, block_size, heads.num_kv_heads, heads.head_dim)
        # What was never written must not matter, be it not even a number. FlashAttention
        # multiplies masked values by zero, so there the filling is merely absurd.
        filling = 1e4 if place.device.type == "cuda" else float("nan")
        self.cache = torch.full(shape, filling, dtype=place.dtype, device=place.device)
        self._write_prefixes(block_size)
        self.meta = self._metadata(block_size)

    def _sequence(self, seed: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
        size = self.heads
        q = normal((context, size.num_heads, size.head_dim), 100 + seed, self.place)
        k = normal((context, size.num_kv_heads, size.head_dim), 200 + seed, self.place)
        v = normal((context, size.num_kv_heads, size.head_dim), 300 + seed, self.place)
        return q, k, v

    def new_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the tokens computed in this step."""
        parts = [
            torch.cat(
                [item[part][-new:] for item, (_, new) in zip(self.full, self.rows, strict=True)]
            )
            for part in range(3)
        ]
        return parts[0], parts[1], parts[2]

    def _slots(self, row: int, first: int, last: int, block_size: int) -> Tensor:
        positions = torch.arange(first, last)
        blocks = self.tables[row][torch.div(positions, block_size, rounding_mode="floor")]
        return blocks * block_size + positions % block_size

    def _write_prefixes(self, block_size: int) -> None:
        for row, (context, new) in enumerate(self.rows):
            slots = self._slots(row, 0, context - new, block_size).to(self.place.device)
            for part in (0, 1):
                flat = self.cache[part].view(-1, *self.cache.shape[3:])
                flat[slots] = self.full[row][part + 1][: context - new]

    def _metadata(self, block_size: int) -> AttentionMetadata:
        device, n = self.place.device, self.num_decodes
        slots = [
            self._slots(row, context - new, context, block_size)
            for row, (context, new) in enumerate(self.rows)
        ]
        contexts = torch.tensor([context for context, _ in self.rows], dtype=torch.int32)
        tables = self.tables.to(torch.int32).to(device)
        lengths = [new for _, new in self.rows[n:]]
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        has_chunks = bool(lengths)
        return AttentionMetadata(
            slot_mapping=torch.cat(slots).to(device),
            num_decodes=n,
            decode_block_tables=tables[:n],
            decode_context_lens=contexts[:n].to(device),
            max_decode_context=int(contexts[:n].max()) if n else 0,
            cu_seqlens_q=bounds.to(device) if has_chunks else None,
            chunk_block_tables=tables[n:] if has_chunks else None,
            chunk_context_lens=contexts[n:].to(device) if has_chunks else None,
            max_seqlen_q=max(lengths, default=0),
            max_seqlen_k=int(contexts[n:].max()) if has_chunks else 0,
        )

    def reference(self, row: int, scale: float, dtype: torch.dtype) -> Tensor:
        """HF's attention over the whole sequence, cut to the tokens computed now."""
        from transformers.models.llama.modeling_llama import eager_attention_forward

        context, new = self.rows[row]
        q, k, v = (x.to(dtype).transpose(0, 1)[None] for x in self.full[row])
        mask = torch.full((context, context), torch.finfo(dtype).min, dtype=dtype).triu(1)
        groups = self.heads.num_heads // self.heads.num_kv_heads
        module = SimpleNamespace(num_key_value_groups=groups, training=False)
        out: Tensor = eager_attention_forward(
            module, q, k, v, mask[None, None].to(q.device), scaling=scale
        )[0]
        return out[0, -new:]
