"""Token embedding and output head, split by vocabulary rows and padded where it does not divide."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.distributed.group import TpGroup
from engine.layers.linear import new_parameter
from engine.layers.sharding import padded_vocab_rows, vocab_shard
from engine.layers.weights import WeightSlice


class VocabParallelWeight(nn.Module):
    """The rows of a vocabulary matrix that this rank keeps; padding rows stay zero."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        group: TpGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.group = group
        self.vocab_size = vocab_size
        self.rows = vocab_shard(vocab_size, group.rank, group.size)
        padded = padded_vocab_rows(vocab_size, group.size)
        self.weight = new_parameter((padded, hidden_size), dtype, device)
        self.weight[self.rows.size :].zero_()

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """The one slice `prefix`weight."""
        target = self.weight[: self.rows.size]
        shape = (self.vocab_size, self.weight.shape[1])
        yield WeightSlice(f"{prefix}weight", target, shape, start=self.rows.start)


class VocabParallelEmbedding(VocabParallelWeight):
    """Rows of the embedding; ranks add zeros for tokens that they do not hold."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embeddings [T, H], equal on every rank."""
        if self.group.size == 1:
            return functional.embedding(input_ids, self.weight)
        local = input_ids - self.rows.start
        outside = (local < 0) | (local >= self.rows.size)
        out = functional.embedding(local.masked_fill(outside, 0), self.weight)
        return self.group.all_reduce(out.masked_fill(outside[..., None], 0))


class OutputHead(nn.Module):
    """Logits over the whole vocabulary; a tied head shares the embedding's rows."""

    def __init__(self, table: VocabParallelWeight) -> None:
        super().__init__()
        self.table = table

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocab], equal on every rank; a view if the padded columns were cut."""
        logits = functional.linear(hidden, self.table.weight)
        gathered = self.table.group.all_gather(logits, dim=-1)
        return gathered[..., : self.table.vocab_size]

    def local(self, hidden: Tensor) -> Tensor:
        """Logits of the rows that this rank holds; nothing is communicated."""
        return functional.linear(hidden, self.table.weight)[..., : self.table.rows.size]
