"""Sampling of next tokens from logits; knows nothing of requests.

Order: temperature, top-k, top-p (over what top-k left, renormalised), min-p, then one draw by an
exponential race: the token with the largest logit / temperature - log(E), E ~ Exp(1). The random
numbers are a hash of (seed, position, token) and of nothing else, so neither the other rows of a
batch nor chunking nor preemption can change them; CPU and CUDA see the same numbers.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_LAST_TOKEN = 0x7FFFFFFF
_NAN_SCORE = -2139095042  # the score part of the key of NaN, just below that of -inf
_LOG2_E = 1.4426950408889634
# Multipliers of well-tested integer finalisers (splitmix64 for rows, a 32-bit one for tokens).
_GOLDEN64 = 0x9E3779B97F4A7C15
_MIX64_A = 0xBF58476D1CE4E5B9
_MIX64_B = 0x94D049BB133111EB
_MIX32_A = 0x21F0AAAD
_MIX32_B = 0xD35A2D97
_LARGEST_UNIFORM = 1.0 - 2.0**-24


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """One row per sampled token, on the logits' device; None switches a filter off for all rows."""

    temperatures: Tensor  # float32 [R]; 0 is greedy
    seeds: Tensor  # int64 [R]
    positions: Tensor  # int64 [R]; index in its sequence of the token to be sampled
    top_k: Tensor | None = None  # int32 or int64 [R]; 0 or less is off
    top_p: Tensor | None = None  # float32 [R]; 1 is off
    min_p: Tensor | None = None  # float32 [R]; 0 is off

    @property
    def is_filtered(self) -> bool:
        """Whether any row may restrict the tokens that can be drawn."""
        return not (self.top_k is None and self.top_p is None and self.min_p is None)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of the model itself: before temperature and filters."""

    sampled: Tensor  # float32 [R]
    ranks: Tensor  # int64 [R]; 1 is the most likely token
    top_ids: Tensor  # int64 [R, n]
    top: Tensor  # float32 [R, n], descending


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Token ids int64 [R] for logits [R, vocab], which are not changed; -1 for a row of NaN.

    Without filters it is one pass over the logits; it never makes the host wait.
    """
    if is_fused(logits):
        from engine.kernels.race import fused_race

        kept = fused_kept(logits, batch) if batch.is_filtered else None
        return fused_race(logits, batch.temperatures, batch.seeds, batch.positions, kept)
    if batch.is_filtered:
        logits = filter_logits(logits, batch)
    return race(logits, batch.temperatures, batch.seeds, batch.positions)


def fused_kept(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """What `filter_logits` keeps of each row, found without sorting."""
    from engine.kernels.filters import fused_filter

    temperatures = batch.temperatures
    off = torch.zeros_like(temperatures)
    return fused_filter(
        logits,
        temperatures,
        off if batch.top_k is None else batch.top_k,
        off + 1 if batch.top_p is None else batch.top_p,
        off if batch.min_p is None else batch.min_p,
    )


def sample_keys(logits: Tensor, batch: SamplingBatch, first_token: int) -> Tensor:
    """Each row's best key among the tokens from `first_token` on, whose logits these columns are.

    The largest key over all parts of a vocabulary holds the token that `sample` draws from the
    whole (`token_of_key`), so ranks need to exchange nothing else. Filters need the whole.
    """
    assert not batch.is_filtered, "filters need the whole distribution"
    columns = (batch.temperatures, batch.seeds, batch.positions)
    if logits.shape[-1] == 0:  # a rank with padding only
        return torch.full_like(batch.seeds, torch.iinfo(torch.int64).min)
    if is_fused(logits):
        from engine.kernels.race import fused_race_keys

        return fused_race_keys(logits, *columns, first_token)
    return race_keys(logits, *columns, first_token)


def is_fused(logits: Tensor) -> bool:
    """Whether Triton's kernels draw from these logits."""
    return logits.is_cuda and importlib.util.find_spec("triton") is not None


def race(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The exponential race, or argmax where the temperature is 0; the reference."""
    scores, tokens = _race(logits, temperatures, seeds, positions, 0)
    return tokens.masked_fill(scores.isnan(), -1)


def race_keys(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, first_token: int
) -> Tensor:
    """The race's winners as keys: the larger the score, the larger; of equals the lower token's.

    The upper 32 bits are the float32 score's, made to order as integers do, the lower ones
    2**31 - 1 less the token id. NaN is the least score.
    """
    scores, columns = _race(logits, temperatures, seeds, positions, first_token)
    bits = scores.masked_fill(scores == 0, 0.0).view(torch.int32)  # -0 equals 0
    ordered = torch.where(bits < 0, bits ^ _LAST_TOKEN, bits).long()
    ordered = ordered.masked_fill(scores.isnan(), _NAN_SCORE)
    return (ordered << 32) | (_LAST_TOKEN - first_token - columns)


def token_of_key(keys: Tensor) -> Tensor:
    """The token ids in race keys; -1 where the scores are NaN."""
    return torch.where((keys >> 32) > _NAN_SCORE, keys.bitwise_not() & _LAST_TOKEN, -1)


def _race(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, first_token: int
) -> tuple[Tensor, Tensor]:
    """(winning score, its column) of each row."""
    out = logits.argmax(dim=-1)
    scores = logits.gather(-1, out[:, None])[:, 0].float()
    if logits.is_cuda:
        rows = torch.arange(len(out), device=out.device)
    else:
        rows = torch.nonzero(temperatures > 0).flatten()  # on a GPU this would make the host wait
    scale = _LOG2_E / temperatures[rows].float()
    noise = exponential(seeds[rows], positions[rows], logits.shape[-1], first_token).log2_()
    raced = (logits[rows].float() * scale[:, None]).sub_(noise)
    drawn = raced.argmax(dim=-1)
    is_drawn = temperatures[rows] > 0
    out[rows] = torch.where(is_drawn, drawn, out[rows])
    best = raced.gather(-1, drawn[:, None])[:, 0]
    scores[rows] = torch.where(is_drawn, best, scores[rows])
    return scores, out


def filter_logits(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """A copy of the logits with -inf where top-k, top-p or min-p exclude a token.

    The most likely token always stays, whatever the parameters.
    """
    temperatures = batch.temperatures.float()
    scaled = logits.float() / temperatures.masked_fill(temperatures <= 0, 1.0)[:, None]
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)[None, :]
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if batch.top_k is not None:
        top_k = batch.top_k[:, None]
        keep &= (rank < top_k) | (top_k <= 0)
    probs = ordered.masked_fill(~keep, float("-inf")).softmax(dim=-1)
    if batch.top_p is not None:
        top_p = batch.top_p[:, None]
        # A token stays if those before it do not reach p yet. At p = 1 rounding of the sum must
        # not cut the tail.
        before = probs.cumsum(dim=-1) - probs
        keep &= (before < top_p) | (top_p >= 1)
    if batch.min_p is not None:
        keep &= probs >= batch.min_p[:, None] * probs[:, :1]
    keep[:, 0] = True
    kept = torch.empty_like(keep).scatter_(-1, order, keep)
    return logits.masked_fill(~kept, float("-inf"))


def ban_tokens(logits: Tensor, rows: Tensor, token_ids: Tensor) -> Tensor:
    """A copy of the logits with -inf at the pairs (row, token): EOS before `min_tokens`."""
    out = logits.clone(memory_format=torch.contiguous_format)
    out[rows, token_ids] = float("-inf")
    return out


def compute_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Log-probabilities of the given tokens and of the `num_top` most likely ones per row."""
    values = logits.float()
    chosen = values.gather(-1, token_ids[:, None])
    norm = values.logsumexp(dim=-1, keepdim=True)
    top, top_ids = values.topk(num_top, dim=-1)
    return Logprobs(
        sampled=(chosen - norm)[:, 0],
        ranks=(values > chosen).sum(dim=-1) + 1,
        top_ids=top_ids,
        top=top - norm,
    )


def row_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two 32-bit keys per row (in int64) from its seed and position."""
    mixed = _mix64(_mix64(seeds + _signed(_GOLDEN64)) ^ positions)
    return mixed & _MASK32, (mixed >> 32) & _MASK32


def uniform(seeds: Tensor, positions: Tensor, vocab_size: int, first_token: int = 0) -> Tensor:
    """Float32 [R, vocab] in (0, 1), fine-grained near 0; the first column is `first_token`'s."""
    first, second = (key[:, None] for key in row_keys(seeds, positions))
    tokens = torch.arange(first_token, first_token + vocab_size, device=seeds.device)
    x = tokens[None, :] + first
    x &= _MASK32
    x ^= x >> 16
    x *= _MIX32_A
    x &= _MASK32
    x ^= second
    x ^= x >> 15
    x *= _MIX32_B
    x &= _MASK32
    x ^= x >> 15
    return x.float().add_(0.5).mul_(2.0**-32).clamp_(max=_LARGEST_UNIFORM)


def exponential(seeds: Tensor, positions: Tensor, vocab_size: int, first_token: int = 0) -> Tensor:
    """Float32 [R, vocab] of Exp(1), exact also near 0, where the likely winners of a race are."""
    return uniform(seeds, positions, vocab_size, first_token).neg_().log1p_().neg_()


def _mix64(x: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64 values, whose products wrap as unsigned ones do."""
    x = (x ^ _shift(x, 30)) * _signed(_MIX64_A)
    x = (x ^ _shift(x, 27)) * _signed(_MIX64_B)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
