"""`assert_golden`: what any engine computed for a reference's tokens, judged in one line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.core.errors import InputError
from golden.stored.reference_file import StoredReference, StoredSequence
from golden.stored.stored_rules import Seen, StoredJudge, StoredStats, said


def assert_golden(
    outputs: Mapping[str, Any] | Sequence[Any],
    reference: StoredReference,
    dtype: str | None = None,
) -> StoredStats:
    """Raises AssertionError with what is wrong; returns what was measured.

    `outputs` speak of `reference.token_ids`, by name or in the same order, each as
    - logits [n, vocab] of the positions (a tensor or an array; one last row may be left out), or
    - one mapping of token id to log-probability per token, None for the first: the
      `prompt_logprobs` of vLLM and of Lockstep, or an output that has such an attribute.

    `dtype` is what was computed in (default: the checkpoint's own).

    Raises:
        InputError: the outputs are of other sequences or of no shape that can be judged.
    """
    named = _named(outputs, reference)
    judge = StoredJudge(reference, dtype or str(reference.about["checkpoint_dtype"]))
    for item in reference.sequences:
        for seen in _seen(item, named[item.name]):
            judge.add(seen)
    stats = judge.finish()
    if not stats.num_values:
        raise InputError("the outputs hold no log-probability of a token that the reference knows")
    problems = "\n  ".join((*stats.violations, *stats.divergences))
    assert stats.passed, f"not the numbers of {reference.about['model']}:\n  {problems}"
    return stats


def _named(
    outputs: Mapping[str, Any] | Sequence[Any], reference: StoredReference
) -> Mapping[str, Any]:
    names = [item.name for item in reference.sequences]
    if isinstance(outputs, Mapping):
        missing = [name for name in names if name not in outputs]
        if missing:
            raise InputError(f"there is no output for {missing[0]!r}")
        return outputs
    if len(outputs) != len(names):
        raise InputError(f"there are {len(outputs)} outputs for {len(names)} sequences")
    return dict(zip(names, outputs, strict=True))


def _seen(item: StoredSequence, output: Any) -> Iterator[Seen]:  # noqa: ANN401
    places = getattr(output, "prompt_logprobs", output)
    if isinstance(places, list | tuple):
        yield _from_places(item, places)
        return
    try:
        logits = torch.as_tensor(output)
    except (TypeError, ValueError, RuntimeError):
        logits = torch.empty(0)
    count = item.num_positions
    if logits.dim() != 2 or logits.shape[0] not in (count, count + 1):
        raise InputError(
            f"{item.name}: an output must be logits of {count} positions, or prompt_logprobs of "
            f"{count + 1} tokens"
        )
    yield from_logits(item, logits[:count])


def from_logits(item: StoredSequence, logits: Tensor) -> Seen:
    """All positions of a sequence by their logits."""
    logits = logits.detach().cpu()
    logprobs = said(torch.log_softmax(logits.double(), dim=-1))
    following = torch.tensor(item.sequence.tokens[1:])[:, None]
    best = dict(enumerate(logits.argmax(-1).tolist()))
    rows = torch.arange(item.num_positions)
    tops = logprobs.gather(-1, item.top_ids)
    return Seen(item.name, rows, tops, logprobs.gather(-1, following)[:, 0], best, follows=False)


def _from_places(item: StoredSequence, places: Sequence[Any]) -> Seen:
    tokens = item.sequence.tokens
    if len(places) != len(tokens):
        raise InputError(f"{item.name}: {len(places)} entries for {len(tokens)} tokens")
    tops, told = [], []
    best: dict[int, int] = {}
    for row, (token, entry) in enumerate(zip(tokens[1:], places[1:], strict=True)):
        found = {} if entry is None else {int(key): _value(value) for key, value in entry.items()}
        tops.append([found.get(one, math.nan) for one in item.top_ids[row].tolist()])
        told.append(found.get(token, math.nan))
        if len(found) > 1:
            best[row] = max(found, key=found.__getitem__)
    rows = torch.arange(item.num_positions)
    values = torch.tensor(tops, dtype=torch.float64)
    return Seen(item.name, rows, values, torch.tensor(told).double(), best, follows=False)


def _value(value: Any) -> float:  # noqa: ANN401
    number = float(getattr(value, "logprob", value))
    return -math.inf if math.isnan(number) else number
