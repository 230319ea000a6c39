"""Draws the next tokens of the sampled rows, with the parameters that their slots hold.

Every rank has the same logits and the same parameters, so all of them draw the same tokens and
nothing needs to be sent between them.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from engine.batch_state import BatchState
from engine.commands import StepCommand, StepLogprobs
from engine.models.decoder import Decoder
from engine.sampler import Logprobs, SamplingBatch, ban_tokens, compute_logprobs, sample


class RowSampler:
    """Reads the rows that `BatchState` has marked for sampling."""

    def __init__(self, state: BatchState) -> None:
        self._state = state

    def draw_plain(self, logits: Tensor) -> Tensor:
        """Tokens of rows that need a temperature at most; safe inside a CUDA graph."""
        return sample(logits, self._batch(logits.shape[0], filtered=False))

    def draw(self, logits: Tensor, command: StepCommand) -> Tensor:
        """Tokens of rows of which some need filters or must not draw certain ids."""
        if command.banned:
            logits = self._without_banned(logits, command)
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

    def _without_banned(self, logits: Tensor, command: StepCommand) -> Tensor:
        rows, ids = array("q"), array("q")
        for ban in command.banned:
            rows.extend([ban.row] * len(ban.token_ids))
            ids.extend(ban.token_ids)
        words = self._state.upload([rows, ids])
        return ban_tokens(logits, words[: len(rows)], words[len(rows) :])


def logprob_tensors(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Log probabilities under the model's own distribution, still on the device."""
    return compute_logprobs(logits, token_ids, num_top)


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
    model: Decoder, hidden_size: int, dtype: torch.dtype, num_rows: int, filtered: bool
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
    sample(model.compute_logits(hidden), batch)
