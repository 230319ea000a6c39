"""Draws the next tokens of the sampled rows, with the parameters that their slots hold.

Every rank draws among the tokens whose logits it computes, and one number per row is exchanged:
the key of the rank's best token. Only a step with a row that needs its whole distribution gathers
the logits. Either way all ranks end with the same tokens.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from engine.distributed.group import TpGroup
from engine.layers.sharding import Shard
from engine.models.decoder import Decoder
from engine.requests.committed_step import StepLogprobs
from engine.sampler import (
    Logprobs,
    SamplingBatch,
    ban_tokens,
    is_fused,
    sample,
    sample_keys,
    token_of_key,
)
from engine.worker.batch_state import BatchState
from engine.worker.command import StepCommand


class RowSampler:
    """Reads the rows that `BatchState` has marked for sampling; `vocab` is this rank's part."""

    def __init__(self, state: BatchState, group: TpGroup, vocab: Shard) -> None:
        self._state = state
        self._group = group
        self._vocab = vocab

    def draw_plain(self, local_logits: Tensor) -> Tensor:
        """Tokens of rows that need a temperature at most; safe inside a CUDA graph."""
        batch = self._batch(local_logits.shape[0], filtered=False)
        return sample_over_ranks(local_logits, batch, self._group, self._vocab)

    def draw_in_place(self, local_logits: Tensor, sampled: Tensor) -> bool:
        """As `draw_plain`, with the tokens in `sampled` and as their slots' next inputs.

        False, and nothing done, where that is not one kernel.
        """
        if self._group.size > 1 or not is_fused(local_logits):
            return False
        from engine.kernels.race import RaceRows, fused_race_rows

        state, num_rows = self._state, local_logits.shape[0]
        rows = RaceRows(
            slots=state.sample_slots[:num_rows],
            positions=state.sample_positions[:num_rows],
            temperatures=state.temperatures,
            seeds=state.seeds,
            last_tokens=state.last_tokens,
            sampled=sampled,
        )
        fused_race_rows(local_logits, rows)
        return True

    def draw_unbanned(self, local_logits: Tensor, command: StepCommand) -> Tensor:
        """The same where some rows must not draw certain ids."""
        first, end = self._vocab.start, self._vocab.start + self._vocab.size
        return self.draw_plain(self._without_banned(local_logits, command, first, end))

    def draw(self, logits: Tensor, command: StepCommand) -> Tensor:
        """Tokens of rows of which some need their whole distribution."""
        logits = self._without_banned(logits, command, 0, logits.shape[1])
        return sample(logits, self._batch(logits.shape[0], command.needs_filters))

    def _batch(self, num_rows: int, filtered: bool) -> SamplingBatch:
        state = self._state
        slots = state.sample_slots[:num_rows]
        return SamplingBatch(
            temperatures=state.temperatures.index_select(0, slots),
            seeds=state.seeds.index_select(0, slots),
            positions=state.sample_positions[:num_rows] + 1,
            top_k=state.top_ks.index_select(0, slots) if filtered else None,
            top_p=state.top_ps.index_select(0, slots) if filtered else None,
            min_p=state.min_ps.index_select(0, slots) if filtered else None,
        )

    def _without_banned(self, logits: Tensor, command: StepCommand, first: int, end: int) -> Tensor:
        """Logits of the tokens [first, end) without those that a row must not draw."""
        rows, columns = array("q"), array("q")
        for ban in command.banned:
            held = [token_id - first for token_id in ban.token_ids if first <= token_id < end]
            rows.extend([ban.row] * len(held))
            columns.extend(held)
        if not rows:
            return logits
        words = self._state.upload([rows, columns])
        return ban_tokens(logits, words[: len(rows)], words[len(rows) :])


def sample_over_ranks(
    local_logits: Tensor, batch: SamplingBatch, group: TpGroup, vocab: Shard
) -> Tensor:
    """What `sample` draws from all ranks' columns together, on every rank; no filters."""
    if group.size == 1:
        return sample(local_logits, batch)
    return token_of_key(group.all_reduce_max(sample_keys(local_logits, batch, vocab.start)))


def to_step_logprobs(columns: Logprobs) -> StepLogprobs:
    """The same on the host; waits for the device."""
    return StepLogprobs(
        sampled=columns.sampled.tolist(),
        ranks=columns.ranks.tolist(),
        top_ids=columns.top_ids.tolist(),
        top_logprobs=columns.top.tolist(),
    )


@torch.inference_mode()
def warm_up_sampling(
    model: Decoder,
    group: TpGroup,
    hidden_size: int,
    dtype: torch.dtype,
    num_rows: int,
    filtered: bool,
) -> None:
    """LM head and sampling of the largest batch, with or without filters."""
    device = next(model.parameters()).device
    hidden = torch.zeros(num_rows, hidden_size, dtype=dtype, device=device)
    integers = torch.zeros(num_rows, dtype=torch.int64, device=device)
    reals = torch.full((num_rows,), 0.5, device=device)
    batch = SamplingBatch(
        temperatures=reals,
        seeds=integers,
        positions=integers,
        top_k=integers if filtered else None,
        top_p=reals if filtered else None,
        min_p=reals if filtered else None,
    )
    if filtered:
        sample(model.compute_logits(hidden), batch)
    else:
        local_logits = model.compute_local_logits(hidden)
        sample_over_ranks(local_logits, batch, group, model.local_vocab)
