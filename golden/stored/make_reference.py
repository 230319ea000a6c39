"""A reference from HF's truth of a model folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.core.errors import ConfigError, InputError
from engine.worker.device import device_name, installed_versions
from golden.cases import ForcedSequence
from golden.check.check_plan import CheckPlan, Say, make_setting
from golden.check.eight_bits import eight_bits_of
from golden.check.hf_side import release
from golden.check.hf_states import NUM_NUDGES, Side, Truth
from golden.check.model_check import truth_for
from golden.models import COMPARED_ROWS
from golden.stored.identity import identity_of
from golden.stored.reference_file import (
    MOST_BYTES_PER_POSITION,
    StoredReference,
    StoredSequence,
    Yardstick,
    dtype_name,
)

DTYPES = (torch.bfloat16, torch.float16)
_BYTES_PER_TOP = 4 * (2 + len(DTYPES))
_OTHER_BYTES = 4 * (4 + 3 * len(DTYPES))


def make_reference(plan: CheckPlan, top: int, say: Say) -> StoredReference:
    """Computes the truth of a plan's model, and what HF errs by in 16 bits."""
    setting = make_setting(plan)
    if eight_bits_of(setting.options):
        raise InputError("a reference is of 16-bit numbers: leave --quantization, --kv-cache-dtype")
    top = min(top, setting.config.vocab_size)
    if top * _BYTES_PER_TOP + _OTHER_BYTES > MOST_BYTES_PER_POSITION:
        most = (MOST_BYTES_PER_POSITION - _OTHER_BYTES) // _BYTES_PER_TOP
        raise ConfigError("top_tokens", top, f"at most {most} keep a position below 2 kB")
    truth, _ = truth_for(setting, say, DTYPES)
    say("digests of the weights")
    about = {
        "model": setting.folder.name,
        "identity": identity_of(setting.folder).to_json(),
        "checkpoint_dtype": setting.config.dtype,
        "vocab_size": setting.config.vocab_size,
        "is_mixture": setting.config.moe is not None,
        "top": top,
        "yardsticks": [dtype_name(dtype) for dtype in DTYPES],
        "runs_of_hf_per_dtype": 1 + NUM_NUDGES,
        "max_tokens": setting.max_tokens,
        "device": device_name(setting.device),
        "versions": installed_versions(setting.device),
    }
    stored = tuple(_stored(truth, item, top) for item in truth.sequences)
    del truth
    release()
    return StoredReference(stored, about)


@torch.inference_mode()
def _stored(truth: Truth, item: ForcedSequence, top: int) -> StoredSequence:
    pieces = []
    for start in range(0, item.num_logits, COMPARED_ROWS):
        rows = torch.arange(start, min(start + COMPARED_ROWS, item.num_logits))
        pieces.append(_piece(truth, item, rows, top))
    columns = {key: torch.cat([piece[key] for piece in pieces]) for key in pieces[0]}
    yardsticks = {
        dtype_name(dtype): Yardstick(
            *(columns[f"{dtype_name(dtype)}.{key}"] for key in Yardstick.__slots__)
        )
        for dtype in DTYPES
    }
    return StoredSequence(
        item,
        columns["ids"],
        columns["logprobs"],
        columns["logsumexp"],
        columns["token"],
        yardsticks,
    )


def _piece(truth: Truth, item: ForcedSequence, rows: Tensor, top: int) -> dict[str, Tensor]:
    place = truth.truth.hidden[item.name].device
    logits = truth.truth.logits(item.name, rows.to(place)).double()
    logsumexp = logits.logsumexp(-1)
    logprobs = logits - logsumexp[:, None]
    best = logprobs.topk(top, dim=-1)
    following = torch.tensor(item.tokens[1:], device=place)[rows.to(place)][:, None]
    token = logprobs.gather(-1, following)[:, 0]
    found = {
        "ids": best.indices,
        "logprobs": best.values,
        "logsumexp": logsumexp,
        "token": token,
    }
    for dtype, sides in _by_dtype(truth.yardsticks).items():
        found |= _errors(dtype, sides, item.name, rows.to(place), logprobs, best.indices, following)
    return {key: value.cpu() for key, value in found.items()}


def _errors(
    dtype: torch.dtype,
    sides: Sequence[Side],
    name: str,
    rows: Tensor,
    logprobs: Tensor,
    ids: Tensor,
    following: Tensor,
) -> dict[str, Tensor]:
    wanted, token = logprobs.gather(-1, ids), logprobs.gather(-1, following)
    errors, token_errors = [], []
    for number, side in enumerate(sides):
        mine = torch.log_softmax(side.logits(name, rows).double(), dim=-1)
        errors.append((mine.gather(-1, ids) - wanted).abs())
        token_errors.append((mine.gather(-1, following) - token).abs()[:, 0])
        if number == 0:
            kl = (logprobs.exp() * (logprobs - mine)).sum(-1).clamp(min=0)
            agrees = mine.argmax(-1) == ids[:, 0]
    label = dtype_name(dtype)
    return {
        f"{label}.error": torch.stack(errors).amax(0),
        f"{label}.token_error": torch.stack(token_errors).amax(0),
        f"{label}.mean_error": errors[0].mean(-1),
        f"{label}.kl": kl,
        f"{label}.agrees": agrees,
    }


def _by_dtype(sides: Sequence[Side]) -> Mapping[torch.dtype, list[Side]]:
    found: dict[torch.dtype, list[Side]] = {}
    for side in sides:
        found.setdefault(side.dtype, []).append(side)
    return found
