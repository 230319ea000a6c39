"""Log probabilities of prompt tokens, from the rows of a step's chunks."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from engine.models.decoder import Decoder
from engine.sampler import Logprobs, compute_logprobs
from engine.worker.batch_state import BatchState
from engine.worker.command import StepCommand


def prompt_logprobs(
    model: Decoder, hidden: Tensor, command: StepCommand, state: BatchState, slice_rows: int
) -> Logprobs:
    """One row per target of the step's chunks, in their order.

    `hidden` holds the step's rows, decodes first. Logits are made for `slice_rows` rows at a time,
    so that a long chunk needs no more memory than a step's sampling.
    """
    assert command.num_prompt_logprobs is not None
    rows, targets = array("q"), array("q")
    first = command.num_decodes
    for chunk in command.chunks:
        rows.extend(range(first, first + len(chunk.prompt_targets)))
        targets.extend(chunk.prompt_targets)
        first += len(chunk.token_ids)
    words = state.upload([rows, targets])
    slices = []
    for start in range(0, len(rows), slice_rows):
        stop = min(start + slice_rows, len(rows))
        logits = model.compute_logits(hidden[words[start:stop]])
        wanted = words[len(rows) + start : len(rows) + stop]
        slices.append(compute_logprobs(logits, wanted, command.num_prompt_logprobs))
    return Logprobs(
        sampled=torch.cat([part.sampled for part in slices]),
        ranks=torch.cat([part.ranks for part in slices]),
        top_ids=torch.cat([part.top_ids for part in slices]),
        top=torch.cat([part.top for part in slices]),
    )
