"""Compact form of token and block ids in the step log."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from engine.core.tokens import Prompt

# In the file a sequence of ids is a list of items: an id, or [first id, length] for ids that
# count upwards. Shorter runs stay explicit because the pair would not be shorter.
SHORTEST_RUN = 3
IdItem = int | list[int]


def encode_ids(ids: Sequence[int]) -> list[IdItem]:
    """Compact form of ids; equal ids give equal forms."""
    if isinstance(ids, range) and ids.step == 1 and len(ids) >= SHORTEST_RUN:
        return [[ids.start, len(ids)]]
    items: list[IdItem] = []
    begin, count = 0, len(ids)
    while begin < count:
        end = begin + 1
        while end < count and ids[end] == ids[end - 1] + 1:
            end += 1
        if end - begin >= SHORTEST_RUN:
            items.append([ids[begin], end - begin])
        else:
            items.extend(ids[begin:end])
        begin = end
    return items


def encode_prompt(prompt: Prompt) -> list[IdItem]:
    """Compact form of a prompt; lazy ranges are not materialised."""
    return [item for span in prompt.spans for item in encode_ids(span)]


def decode_ids(items: Sequence[object]) -> Prompt:
    """Inverse of `encode_ids` and `encode_prompt`; runs stay lazy.

    Raises:
        ValueError: an item is neither an int64 id nor a run of them.
    """
    spans: list[range | array[int]] = []
    explicit = array("q")
    for item in items:
        if isinstance(item, int) and not isinstance(item, bool):
            _check_int64(item)
            explicit.append(item)
            continue
        first, length = _run(item)
        if explicit:
            spans.append(explicit)
            explicit = array("q")
        spans.append(range(first, first + length))
    spans.append(explicit)
    return Prompt.from_spans(spans)


def _run(item: object) -> tuple[int, int]:
    if (
        not isinstance(item, list)
        or len(item) != 2
        or not all(isinstance(part, int) and not isinstance(part, bool) for part in item)
        or item[1] < 1
    ):
        raise ValueError(f"{item!r} is neither an id nor a [first, length] pair")
    _check_int64(item[0])
    _check_int64(item[0] + item[1] - 1)
    return item[0], item[1]


def _check_int64(value: int) -> None:
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"id {value} does not fit into 64 bits")
