# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202 (Triton gives its own meaning to annotations)
"""Top-k, top-p and min-p without sorting: what a row keeps ends at one value of its logits.

All three filters keep a prefix of the falling order. A search over the values themselves, as
integers that order as they do, finds the last value that is kept and how many of its equals are.
Once the search is down to few candidates they are copied out, and go on alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192
_MOST_CANDIDATES = 16384
_ALL = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _keys(x):
    """Integers in the order of the floats; both zeros are equal."""
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        key = tl.where(bits < 0, bits ^ 0x7FFF, bits)
    return tl.where(x == 0.0, 0, key)


@triton.jit
def _value(key, dtype: tl.constexpr):
    """The float of a key, in float32."""
    if dtype == tl.float32:
        bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.int32)
    else:
        bits = tl.where(key < 0, key ^ 0x7FFF, key).to(tl.int16)
    return bits.to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _count(ptr, length, key, dtype: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """How many numbers have this key or a larger one."""
    bound = _value(key, dtype)
    lane = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, length, BLOCK, num_stages=STAGES):
        # What is not a number is at least nothing.
        x = tl.load(ptr + start + lane, mask=start + lane < length, other=float("nan"))
        count += (x.to(tl.float32) >= bound).to(tl.int32)
    return tl.sum(count, axis=0)


@triton.jit
def _weight(
    ptr, length, key, top, scale, dtype: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """Weight of the numbers with this key or a larger one; that of `top` is 1."""
    bound = _value(key, dtype)
    lane = tl.arange(0, BLOCK)
    weight = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, length, BLOCK, num_stages=STAGES):
        x = tl.load(ptr + start + lane, mask=start + lane < length, other=float("nan"))
        x = x.to(tl.float32)
        weight += tl.where(x >= bound, tl.exp2((x - top) * scale), 0.0)
    return tl.sum(weight, axis=0)


@triton.jit
def _is_enough(
    ptr, length, key, top, scale, top_k, wanted, limits_number,
    dtype: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Whether all that a row keeps has this key or a larger one."""
    # With top-k, the weight that p is of is known only once k numbers are in.
    if limits_number:
        enough = _count(ptr, length, key, dtype, BLOCK, STAGES) >= top_k
    else:
        enough = _weight(ptr, length, key, top, scale, dtype, BLOCK, STAGES) >= wanted
    return enough


@triton.jit
def _middle(low, high):
    return (low.to(tl.int64) + ((high.to(tl.int64) - low.to(tl.int64)) >> 1)).to(tl.int32)


@triton.jit
def _filter_kernel(
    logits_ptr,
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    values_ptr,
    last_ptr,
    scratch_ptr,
    row_stride,
    num_columns,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * row_stride
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    top_k, top_p = tl.load(top_k_ptr + row).to(tl.int32), tl.load(top_p_ptr + row)
    min_p, temperature = tl.load(min_p_ptr + row), tl.load(temperatures_ptr + row)
    limits_number = (top_k > 0) & (top_k < num_columns)
    lane = tl.arange(0, BLOCK)
    value, last = tl.full([], float("-inf"), tl.float32), tl.full([], _ALL, tl.int32)
    if limits_number | (top_p < 1.0) | (min_p > 0.0):
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        least = tl.full([BLOCK], float("inf"), tl.float32)
        for start in tl.range(0, num_columns, BLOCK, num_stages=STAGES):
            at = start + lane
            x = tl.load(logits + at, mask=at < num_columns, other=float("-inf")).to(tl.float32)
            best = tl.maximum(best, x)
            least = tl.minimum(least, tl.where(at < num_columns, x, float("inf")))
        top, bottom = tl.max(best, axis=0), tl.min(least, axis=0)
        scale = 1.4426950408889634 / tl.where(temperature > 0, temperature, 1.0)
        top_key, bottom_key = _keys(top.to(dtype)), _keys(bottom.to(dtype))
        low = bottom_key
        if limits_number | (top_p < 1.0):
            total = tl.full([], 0.0, tl.float32)
            if limits_number == 0:
                total = _weight(logits, num_columns, bottom_key, top, scale, dtype, BLOCK, STAGES)
            # All that is kept lies at `low` or above, which is sought downwards in growing steps.
            step = tl.full([], 64, tl.int64)
            low = tl.maximum(top_key - step, bottom_key).to(tl.int32)
            while (low > bottom_key) & (
                _is_enough(
                    logits, num_columns, low, top, scale, top_k, top_p * total, limits_number,
                    dtype, BLOCK, STAGES,
                )
                == 0
            ):  # fmt: skip
                step = step * 4
                low = tl.maximum(top_key - step, bottom_key).to(tl.int32)
            source, length = logits, num_columns
            if _count(logits, num_columns, low, dtype, BLOCK, STAGES) <= ROOM:
                room = scratch_ptr + row * ROOM
                bound = _value(low, dtype)
                used = tl.full([], 0, tl.int32)
                for start in tl.range(0, num_columns, BLOCK, num_stages=STAGES):
                    at = start + lane
                    x = tl.load(logits + at, mask=at < num_columns, other=float("nan"))
                    kept = (x.to(tl.float32) >= bound).to(tl.int32)
                    number = tl.sum(kept, axis=0)
                    if number > 0:
                        place = used + tl.cumsum(kept, axis=0) - 1
                        tl.store(room + place, x, mask=kept == 1)
                    used += number
                tl.debug_barrier()
                source, length = room, used
            num_kept = tl.full([], _ALL, tl.int32)
            if limits_number:
                # The largest value that top_k numbers reach.
                high = (top_key.to(tl.int64) + 1).to(tl.int32)
                while high.to(tl.int64) - low > 1:
                    middle = _middle(low, high)
                    if _count(source, length, middle, dtype, BLOCK, STAGES) >= top_k:
                        low = middle
                    else:
                        high = middle
                num_kept = top_k - _count(source, length, low + 1, dtype, BLOCK, STAGES)
                if top_p < 1.0:
                    each = tl.exp2((_value(low, dtype) - top) * scale)
                    total = num_kept * each
                    total += _weight(source, length, low + 1, top, scale, dtype, BLOCK, STAGES)
            if top_p < 1.0:
                # The smallest value whose greater ones do not reach p together.
                wanted = top_p * total
                under, floor = low.to(tl.int64) - 1, low
                high = top_key
                while high - under > 1:
                    middle = ((under + high) >> 1).to(tl.int32)
                    above = _weight(source, length, middle + 1, top, scale, dtype, BLOCK, STAGES)
                    if above < wanted:
                        high = middle
                    else:
                        under = middle.to(tl.int64)
                above = _weight(source, length, high + 1, top, scale, dtype, BLOCK, STAGES)
                each = tl.exp2((_value(high, dtype) - top) * scale)
                equals = tl.ceil((wanted - above) / each)
                equals = tl.maximum(tl.minimum(equals, 1073741824.0), 1.0).to(tl.int32)
                num_kept = tl.where(high > floor, equals, tl.minimum(num_kept, equals))
                low = high
            value = _value(low, dtype)
            equal = _count(source, length, low, dtype, BLOCK, STAGES)
            equal -= _count(source, length, low + 1, dtype, BLOCK, STAGES)
            if num_kept < equal:
                last = _nth_equal(logits, num_columns, value, num_kept, BLOCK, STAGES)
        if min_p > 0.0:
            least = tl.full([BLOCK], float("inf"), tl.float32)
            for start in tl.range(0, num_columns, BLOCK, num_stages=STAGES):
                at = start + lane
                x = tl.load(logits + at, mask=at < num_columns, other=float("-inf")).to(tl.float32)
                likely = tl.exp2((x - top) * scale) >= min_p
                least = tl.minimum(least, tl.where(likely, x, float("inf")))
            bound = tl.minimum(tl.min(least, axis=0), top)
            last = tl.where(bound > value, _ALL, last)
            value = tl.maximum(bound, value)
    tl.store(values_ptr + row, value)
    tl.store(last_ptr + row, last)


@triton.jit
def _nth_equal(ptr, length, value, number, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Index of the `number`-th entry that equals `value`."""
    lane = tl.arange(0, BLOCK)
    seen = tl.full([], 0, tl.int32)
    found = tl.full([], -1, tl.int32)
    for start in tl.range(0, length, BLOCK, num_stages=STAGES):
        at = start + lane
        x = tl.load(ptr + at, mask=at < length, other=float("-inf")).to(tl.float32)
        equal = ((x == value) & (at < length)).to(tl.int32)
        rank = seen + tl.cumsum(equal, axis=0)
        found = tl.maximum(found, tl.max(tl.where((equal == 1) & (rank == number), at, -1), axis=0))
        seen += tl.sum(equal, axis=0)
    return found


def fused_filter(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """(value float32 [R], token int32 [R]) that say what `filter_logits` keeps of each row.

    A token stays if its logit is above the value, or equal and the token at most the given one.
    """
    num_rows, num_columns = logits.shape
    assert logits.stride(1) == 1 or num_columns <= 1
    device = logits.device
    values = torch.empty(num_rows, dtype=torch.float32, device=device)
    last = torch.empty(num_rows, dtype=torch.int32, device=device)
    scratch = torch.empty(num_rows, _MOST_CANDIDATES, dtype=logits.dtype, device=device)
    if num_rows:
        _filter_kernel[(num_rows,)](
            logits,
            temperatures,
            top_k,
            top_p,
            min_p,
            values,
            last,
            scratch,
            logits.stride(0),
            num_columns,
            ROOM=_MOST_CANDIDATES,
            BLOCK=_BLOCK,
            STAGES=4 if logits.dtype != torch.float32 else 2,
            num_warps=16,
        )
    return values, last
