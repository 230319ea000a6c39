# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202 (Triton gives its own meaning to annotations)
"""The exponential race over the vocabulary, or a rank's part of it, in one read of the logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.sizes import cdiv, next_power_of_2

_BLOCK = 2048
# The score part of the key of NaN, just below that of -inf.
_NAN_SCORE = tl.constexpr(-2139095042)
_TARGET_PROGRAMS = 1056


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _log2(x, NATIVE: tl.constexpr):
    if NATIVE:
        # One instruction of the special function unit, where tl.log2 is a polynomial of a dozen.
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def _exponential_log2(token, first, second, NATIVE: tl.constexpr):
    """log2 of the row's exponential number at `token`, up to a constant that all tokens share."""
    x = token.to(tl.uint32) + first
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) ^ second
    x = (x ^ (x >> 15)) * 0xD35A2D97
    x = x ^ (x >> 15)
    u = (x.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
    u = tl.minimum(u, 0.9999999403953552)
    # -log2(1 - u): by its series where 1 - u would round away what matters.
    series = u * (1.0 + u * (0.5 + u * 0.3333333333333333)) * 1.4426950408889634
    return _log2(tl.where(u < 0.0078125, series, -_log2(1.0 - u, NATIVE)), NATIVE)


@triton.jit
def _race_kernel(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    positions_ptr,
    values_ptr,
    last_ptr,
    slots_ptr,
    out_ptr,
    row_stride,
    first_token,
    num_columns,
    part_size,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    KEYS: tl.constexpr,
    FILTERED: tl.constexpr,
    SLOTS: tl.constexpr,
):
    part, row = tl.program_id(0), tl.program_id(1)
    begin = first_token + part * part_size
    end = tl.minimum(begin + part_size, first_token + num_columns)
    logits = logits_ptr + row.to(tl.int64) * row_stride - first_token
    place = row.to(tl.int64)
    if SLOTS:
        place = tl.load(slots_ptr + row)
    temperature = tl.load(temperatures_ptr + place)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_at = tl.full([BLOCK], 0, tl.int32) + begin
    if FILTERED:
        value, last = tl.load(values_ptr + row), tl.load(last_ptr + row)
    if temperature > 0:
        seed = tl.load(seeds_ptr + place).to(tl.uint64)
        position = tl.load(positions_ptr + row)
        if SLOTS:
            position += 1
        position = position.to(tl.uint64)
        key = _mix64(_mix64(seed + 0x9E3779B97F4A7C15) ^ position)
        first, second = key.to(tl.uint32), (key >> 32).to(tl.uint32)
        scale = 1.4426950408889634 / temperature
        for start in tl.range(begin, end, BLOCK):
            token = start + lane
            x = tl.load(logits + token, mask=token < end, other=float("-inf")).to(tl.float32)
            score = x * scale - _exponential_log2(token, first, second, NATIVE)
            if FILTERED:
                kept = (x > value) | ((x == value) & (token <= last))
                score = tl.where(kept, score, float("-inf"))
            better = score > best
            best = tl.where(better, score, best)
            best_at = tl.where(better, token, best_at)
    else:
        for start in tl.range(begin, end, BLOCK):
            token = start + lane
            x = tl.load(logits + token, mask=token < end, other=float("-inf")).to(tl.float32)
            better = x > best
            best = tl.where(better, x, best)
            best_at = tl.where(better, token, best_at)
    top = tl.max(best, axis=0)
    # Of equal scores the lowest token wins, as in torch.argmax.
    winner = tl.min(tl.where(best == top, best_at, 0x7FFFFFFF), axis=0)
    # No score is larger than NaN's; a row of NaN shows in its first logit. An empty part is the
    # same, so that it never wins.
    x = tl.load(logits + begin, mask=begin < end, other=float("nan")).to(tl.float32)
    is_nan = (top == float("-inf")) & (x != x)
    at = row * tl.num_programs(0) + part
    if KEYS:
        tl.store(out_ptr + at, _key(top, winner, is_nan))
    else:
        tl.store(out_ptr + at, tl.where(is_nan, -1, winner).to(tl.int64))


@triton.jit
def _key(score, token, is_nan):
    """See engine.sampler.race_keys."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(is_nan, _NAN_SCORE, ordered)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def _final_kernel(
    key_ptr, out_ptr, slots_ptr, last_tokens_ptr,
    PARTS: tl.constexpr, KEYS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    key = tl.max(tl.load(key_ptr + row * PARTS + tl.arange(0, PARTS)), axis=0)
    if KEYS:
        tl.store(out_ptr + row, key)
    else:
        token = 0x7FFFFFFF - (key & 0x7FFFFFFF)
        token = tl.where((key >> 32) <= _NAN_SCORE, -1, token)
        tl.store(out_ptr + row, token)
        if SLOTS:
            tl.store(last_tokens_ptr + tl.load(slots_ptr + row), tl.maximum(token, 0))


def fused_race(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    kept: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """See engine.sampler.race; rows of the logits may be strided.

    With `kept`, from `fused_filter`, only the tokens that it describes take part.
    """
    return _run(logits, temperatures, seeds, positions, 0, keys=False, kept=kept)


@dataclass(frozen=True, slots=True)
class RaceRows:
    """Rows whose parameters lie at their slots, and where their winners go."""

    slots: Tensor  # int64 [R]
    positions: Tensor  # int64 [R]: of the last computed token, one before the drawn one
    temperatures: Tensor  # float32 [slots]
    seeds: Tensor  # int64 [slots]
    last_tokens: Tensor  # int64 [slots], written
    sampled: Tensor  # int64 [R], written


def fused_race_rows(logits: Tensor, rows: RaceRows) -> None:
    """The race of `fused_race` without gathering its columns first or scattering its winners."""
    _run(
        logits,
        rows.temperatures,
        rows.seeds,
        rows.positions,
        0,
        keys=False,
        rows=rows,
    )


def fused_race_keys(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, first_token: int
) -> Tensor:
    """See engine.sampler.race_keys."""
    return _run(logits, temperatures, seeds, positions, first_token, keys=True)


def _run(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    first_token: int,
    keys: bool,
    kept: tuple[Tensor, Tensor] | None = None,
    rows: RaceRows | None = None,
) -> Tensor:
    num_rows, num_columns = logits.shape
    assert logits.stride(1) == 1 or num_columns <= 1
    if rows is not None:
        out = rows.sampled
    else:
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    parts = next_power_of_2(cdiv(_TARGET_PROGRAMS, num_rows))
    parts = min(parts, 64, next_power_of_2(cdiv(num_columns, _BLOCK)))
    part_size = cdiv(cdiv(num_columns, parts), _BLOCK) * _BLOCK
    is_final = parts == 1 and rows is None
    partial = (
        out if is_final else torch.empty((num_rows, parts), dtype=out.dtype, device=out.device)
    )
    slots = positions if rows is None else rows.slots
    _race_kernel[(parts, num_rows)](
        logits,
        temperatures,
        seeds,
        positions,
        *((temperatures, temperatures) if kept is None else kept),
        slots,
        partial,
        logits.stride(0),
        first_token,
        num_columns,
        part_size,
        BLOCK=_BLOCK,
        NATIVE=logits.device.type != "cpu",
        KEYS=keys or not is_final,
        FILTERED=kept is not None,
        SLOTS=rows is not None,
        num_warps=8,
    )
    if not is_final:
        last_tokens = out if rows is None else rows.last_tokens
        _final_kernel[(num_rows,)](
            partial,
            out,
            slots,
            last_tokens,
            PARTS=parts,
            KEYS=keys,
            SLOTS=rows is not None,
            num_warps=1,
        )
    return out
