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
    explicit: list[int] = []
    for item in items:
        if type(item) is int:
            explicit.append(item)
            continue
        if explicit:
            spans.append(explicit_ids(explicit))
            explicit = []
        spans.append(_run(item))
    spans.append(explicit_ids(explicit))
    return Prompt.from_spans(spans)


def explicit_ids(ids: Sequence[int]) -> array[int]:
    """Ids as an array.

    Raises:
        ValueError: an id does not fit into 64 bits.
    """
    try:
        return array("q", ids)
    except OverflowError:
        raise ValueError("an id does not fit into 64 bits") from None


def _run(item: object) -> range:
    if type(item) is list and len(item) == 2:
        first, length = item
        if type(first) is int and type(length) is int and length >= 1:
            explicit_ids((first, first + length - 1))
            return range(first, first + length)
    raise ValueError(f"{item!r} is neither an id nor a [first, length] pair")
