"""Token ids to text: whole outputs, and token by token with stop strings.

Knows a tokenizer only as something with `decode`; the scheduler learns of a stop string through
the ids that the caller passes to `commit(stopped=...)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# Tokens that are decoded again with each new one, so that merges and spaces come out right.
_CONTEXT_TOKENS = 6
_INCOMPLETE = "�"  # a byte sequence that more tokens may complete


class Decoder(Protocol):
    """The part of a Hugging Face tokenizer that is needed here."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of the ids."""


def decode_output(
    tokenizer: Decoder,
    token_ids: Sequence[int],
    stopped_by_token: bool,
    *,
    skip_special_tokens: bool = True,
    include_stop: bool = False,
) -> str:
    """Text of a finished output; the text of a token that ended it is left out (BUG-C51)."""
    end = len(token_ids) - (1 if stopped_by_token and not include_stop else 0)
    return tokenizer.decode(list(token_ids[:end]), skip_special_tokens=skip_special_tokens)


class IncrementalDetokenizer:
    """Text of one growing output, with stop strings found across token borders.

    `stop_string` is set once a stop string ended the text; `text` is then already cut.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        stop_strings: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = tuple(stop_strings)
        self._min_tokens = min_tokens
        self._skip_special_tokens = skip_special_tokens
        self._include_stop = include_stop
        self._token_ids: list[int] = []
        self._context_start = 0  # decoded text before `_emitted_end` starts at this token
        self._emitted_end = 0  # tokens whose text is in `text`
        self.text = ""
        self.stop_string: str | None = None

    def append(self, token_id: int) -> bool:
        """Adds one token; True if a stop string is now complete."""
        self._token_ids.append(token_id)
        known = len(self.text)
        self.text += self._new_text(final=False)
        if not self._stop_strings or len(self._token_ids) <= self._min_tokens:  # BUG-C49
            return False
        return self._find_stop(known)

    def finish(self, stopped_by_token: bool) -> str:
        """The final text: bytes that never became a character are shown as they are."""
        if self.stop_string is None:
            if stopped_by_token and not self._include_stop:
                # The stop token was appended like any other; its text does not belong here.
                return decode_output(
                    self._tokenizer,
                    self._token_ids,
                    True,
                    skip_special_tokens=self._skip_special_tokens,
                )
            self.text += self._new_text(final=True)
        return self.text

    def stable_text(self) -> str:
        """The part of the text that no later stop string can take back."""
        if self.stop_string is not None or not self._stop_strings:
            return self.text
        longest = max(len(stop) for stop in self._stop_strings) - 1
        return self.text[: max(0, len(self.text) - longest)]

    def _new_text(self, final: bool) -> str:
        before = self._decode(self._context_start, self._emitted_end)
        after = self._decode(self._context_start, len(self._token_ids))
        if after.endswith(_INCOMPLETE) and not final:
            return ""
        if len(after) <= len(before):
            return ""
        self._emitted_end = len(self._token_ids)
        self._context_start = max(self._context_start, self._emitted_end - _CONTEXT_TOKENS)
        return after[len(before) :]

    def _decode(self, start: int, stop: int) -> str:
        if start == stop:
            return ""
        return self._tokenizer.decode(
            self._token_ids[start:stop], skip_special_tokens=self._skip_special_tokens
        )

    def _find_stop(self, known: int) -> bool:
        first: tuple[int, str] | None = None
        for stop in self._stop_strings:
            # The match must end in new text, so it can begin at most len(stop) - 1 before it.
            place = self.text.find(stop, max(0, known - len(stop) + 1))
            if place >= 0 and (first is None or place < first[0]):
                first = (place, stop)
        if first is None:
            return False
        place, self.stop_string = first
        self.text = self.text[: place + (len(self.stop_string) if self._include_stop else 0)]
        return True
