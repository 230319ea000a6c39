"""Hash ids of traces: how many tokens a block has, ids as names, and blocks that hold answers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from sim.workloads.table import HASH_SPACE, HashedPrefixes, first_tokens, output_stripe

# Block sizes that a trace may have, where it does not have that of its format.
_SIZES = tuple(1 << power for power in range(13))


def block_size_of(samples: Sequence[tuple[int, int]], usual: int) -> int | None:
    """The block size that fits all (prompt length, number of ids), the usual one if it does."""
    for size in (usual, *_SIZES):
        if all(-(-length // size) == count for length, count in samples):
            return size
    return None


class BlockNames:
    """Hash ids are names: small ones stand for themselves, all others get ids of their own."""

    def __init__(self, block_tokens: int) -> None:
        self._first_own = HASH_SPACE // block_tokens // 2
        self._own: dict[int, int] = {}

    def of(self, hash_ids: Sequence[int]) -> Sequence[int]:
        """The ids of a row's blocks."""
        if not hash_ids or (min(hash_ids) >= 0 and max(hash_ids) < self._first_own):
            return hash_ids
        return [self._one(hash_id) for hash_id in hash_ids]

    def _one(self, hash_id: int) -> int:
        if 0 <= hash_id < self._first_own:
            return hash_id
        return self._own.setdefault(hash_id, self._first_own + len(self._own))


def name_answers(
    hashed: HashedPrefixes,
    previous: array[int],
    prompt_tokens: array[int],
    output_tokens: array[int],
) -> None:
    """Gives blocks of a later turn that hold its parent's answer the tokens that were generated.

    Where a prompt extends that of `previous[row]`, the tokens behind it are that row's output, as
    far as no row before has said what is in those blocks.
    """
    length = hashed.block_tokens
    # How many tokens of a block some row's prompt has named.
    named: dict[int, int] = {}
    for row, parent in enumerate(previous):
        ids = hashed.ids[hashed.offsets[row] : hashed.offsets[row + 1]]
        if parent >= 0:
            _name_answer(hashed, ids, parent, prompt_tokens, output_tokens, named)
        left = prompt_tokens[row]
        for hash_id in ids:
            taken = min(length, left)
            if named.get(hash_id, 0) < taken:
                named[hash_id] = taken
            left -= taken


def _name_answer(
    hashed: HashedPrefixes,
    ids: array[int],
    parent: int,
    prompt_tokens: array[int],
    output_tokens: array[int],
    named: dict[int, int],
) -> None:
    length, before = hashed.block_tokens, prompt_tokens[parent]
    parent_ids = hashed.ids[hashed.offsets[parent] : hashed.offsets[parent + 1]]
    full, tail = divmod(before, length)
    if ids[:full] != parent_ids[:full]:
        return
    answer = output_stripe(parent, output_tokens[parent])
    last = min(len(ids), -(-(before + len(answer)) // length))
    for index in range(full, last):
        hash_id, known = ids[index], tail if index == full else 0
        if named.get(hash_id, 0) > known:
            continue
        spans: list[range] = []
        if known:
            spans.extend(first_tokens(hashed.block_spans(parent_ids[full]), known))
        start = max(0, index * length - before)
        spans.append(answer[start : start + length - known])
        used = known + len(spans[-1])
        if used < length:
            spans.append(range(hash_id * length + used, (hash_id + 1) * length))
        hashed.answers[hash_id] = tuple(spans)
