"""Token sequences that may be lazy: explicit ids, ranges, or spans of ranges.

A *content* is the canonical form of some consecutive tokens: a `range` with step 1 where the
ids count upwards by one, else the bytes of their little-endian int64 array. Two contents are
equal if and only if their token ids are, so the prefix cache compares contents and never
materialises a simulated prompt.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import overload

import xxhash

Content = range | bytes


def content_of(tokens: array[int]) -> Content:
    """Canonical content of explicit token ids."""
    first, length = tokens[0], len(tokens)
    if tokens[-1] - first == length - 1 and tokens == array("q", range(first, first + length)):
        return range(first, first + length)
    return _to_bytes(tokens)


def digest(content: Content, seed: int) -> int:
    """64-bit xxhash of a content; equal tokens have equal digests in any process."""
    data = content if isinstance(content, bytes) else b"%d:%d" % (content.start, content.stop)
    return xxhash.xxh64_intdigest(data, seed)


def _to_bytes(tokens: array[int]) -> bytes:
    if sys.byteorder == "big":
        tokens = array("q", tokens)
        tokens.byteswap()
    return tokens.tobytes()


class Prompt(Sequence[int]):
    """Immutable token sequence made of spans, each a `range` of step 1 or an int64 array.

    `Prompt([5, 6, 9])` holds explicit ids, `Prompt(range(1000, 2000))` one lazy range and
    `Prompt.from_spans([...])` any mixture. Slices are arrays of ids.
    """

    __slots__ = ("_ends", "_spans")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        if isinstance(tokens, range) and tokens.step == 1:
            spans: list[range | array[int]] = [tokens] if tokens else []
        else:
            explicit = array("q", tokens)
            spans = [explicit] if explicit else []
        self._spans = spans
        self._ends = [len(span) for span in spans]

    @classmethod
    def from_spans(cls, spans: Iterable[range | array[int]]) -> Prompt:
        """Concatenates spans without materialising ranges; neighbours that continue are joined."""
        joined: list[range | array[int]] = []
        for span in spans:
            if not span:
                continue
            last = joined[-1] if joined else None
            if isinstance(span, range):
                if span.step != 1:
                    raise ValueError(f"span {span!r}: only ranges of step 1 are supported")
                if isinstance(last, range) and last.stop == span.start:
                    joined[-1] = range(last.start, span.stop)
                    continue
            joined.append(span)
        prompt = cls()
        prompt._spans = joined
        prompt._ends = list(accumulate(len(span) for span in joined))
        return prompt

    @property
    def spans(self) -> tuple[range | array[int], ...]:
        """The spans, for codecs; they must not be changed."""
        return tuple(self._spans)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, key: int) -> int: ...

    @overload
    def __getitem__(self, key: slice) -> array[int]: ...

    def __getitem__(self, key: int | slice) -> int | array[int]:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            tokens = self.tokens(start, max(start, stop))
            return tokens if step == 1 else self.tokens(0, len(self))[key]
        index = key + len(self) if key < 0 else key
        if not 0 <= index < len(self):
            raise IndexError("token index out of range")
        which = bisect_right(self._ends, index)
        span = self._spans[which]
        return span[index - self._ends[which] + len(span)]

    def __iter__(self) -> Iterator[int]:
        for span in self._spans:
            yield from span

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Prompt):
            return NotImplemented
        return len(self) == len(other) and self.tokens(0, len(self)) == other.tokens(0, len(other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Prompt({len(self)} tokens in {len(self._spans)} spans)"

    def tokens(self, start: int, stop: int) -> array[int]:
        """Explicit ids of positions start..stop-1."""
        out = array("q")
        for part in self._parts(start, stop):
            out.extend(part)
        return out

    def content(self, start: int, stop: int) -> Content:
        """Canonical content of positions start..stop-1 (at least one)."""
        parts = self._parts(start, stop)
        if len(parts) == 1:
            part = parts[0]
            return part if isinstance(part, range) else content_of(part)
        return content_of(self.tokens(start, stop))

    def _parts(self, start: int, stop: int) -> list[range | array[int]]:
        parts: list[range | array[int]] = []
        which = bisect_right(self._ends, start)
        while start < stop and which < len(self._spans):
            span = self._spans[which]
            base = self._ends[which] - len(span)
            part = span[start - base : stop - base]
            parts.append(part)
            start += len(part)
            which += 1
        return parts
