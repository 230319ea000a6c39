"""Token ids to text: whole outputs, and token by token with stop strings.

Knows a tokenizer only as something with `decode`; the scheduler learns of a stop string through
the ids that the caller passes to `commit(stopped=...)`.

`tokenizers.DecodeStream` would be faster, but it raises where byte tokens turn out not to be
UTF-8 ("Invalid prefix encountered"), and it cannot find a stop string before a run of byte tokens
is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# The window of tokens that is decoded with each new one is moved on when it gets this long.
_WINDOW_TOKENS = 16
_CONTEXT_TOKENS = 6  # of the prompt
_INCOMPLETE = "\ufffd"  # a byte sequence that more tokens may complete


class Decoder(Protocol):
    """The part of a Hugging Face tokenizer that is needed here."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of the ids."""


def byte_token_ids(tokenizer: object) -> frozenset[int]:
    """Ids of the tokens `<0x00>` .. `<0xFF>` of a tokenizer with byte fallback.

    A run of them is decoded as a whole: one byte that is no UTF-8 turns all of it into U+FFFD, so
    no part of the run has its text before the run is over.
    """
    to_ids = getattr(tokenizer, "convert_tokens_to_ids", None)
    to_tokens = getattr(tokenizer, "convert_ids_to_tokens", None)
    if to_ids is None or to_tokens is None:
        return frozenset()
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    found = [token_id for token_id in to_ids(names) if isinstance(token_id, int)]
    pairs = zip(found, to_tokens(found), strict=True)
    return frozenset(token_id for token_id, name in pairs if name in names)


def prompt_context(
    tokenizer: Decoder,
    prompt: Sequence[int],
    byte_ids: frozenset[int],
    skip_special_tokens: bool = True,
) -> tuple[int, ...]:
    """The prompt's last tokens, behind which the output's first one is read.

    Some tokenizers drop the space before the first word of a text; behind a prompt it counts.
    Empty where the prompt breaks off within a character or has no text.
    """
    context = tuple(prompt[-_CONTEXT_TOKENS:])
    behind_bytes = list(context)
    while behind_bytes and not byte_ids.isdisjoint(behind_bytes):
        del behind_bytes[0]
    try:
        text = tokenizer.decode(list(context), skip_special_tokens=skip_special_tokens)
        if not tokenizer.decode(behind_bytes, skip_special_tokens=skip_special_tokens):
            return ()  # no text, or a run of bytes that the output may go on with
    except Exception:  # a tokenizer is foreign code, and a prompt of ids may hold what it lacks
        return ()
    return () if text.endswith(_INCOMPLETE) else context


def decode_output(
    tokenizer: Decoder,
    token_ids: Sequence[int],
    stopped_by_token: bool,
    *,
    skip_special_tokens: bool = True,
    include_stop: bool = False,
    context: Sequence[int] = (),
) -> str:
    """Text of a finished output behind the `context` tokens of its prompt; the text of a token
    that ended it is left out (BUG-C51)."""
    end = len(token_ids) - (1 if stopped_by_token and not include_stop else 0)
    return _text_behind(tokenizer, context, token_ids[:end], skip_special_tokens)


def _text_behind(
    tokenizer: Decoder, context: Sequence[int], token_ids: Sequence[int], skip_special: bool
) -> str:
    if not context:
        return tokenizer.decode(list(token_ids), skip_special_tokens=skip_special)
    before = tokenizer.decode(list(context), skip_special_tokens=skip_special)
    whole = tokenizer.decode([*context, *token_ids], skip_special_tokens=skip_special)
    return whole[len(before) :]


class IncrementalDetokenizer:
    """Text of one growing output, with stop strings found across token borders.

    `text` holds only what no later token can change. `stop_string` is set once a stop string
    ended the output; `text` is then final, and cut.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        stop_strings: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        context: Sequence[int] = (),
        byte_ids: frozenset[int] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = tuple(stop_strings)
        self._min_tokens = min_tokens
        self._skip_special_tokens = skip_special_tokens
        self._include_stop = include_stop
        self._byte_ids = byte_token_ids(tokenizer) if byte_ids is None else byte_ids
        self._context = tuple(context)
        self._token_ids: list[int] = [*context]
        # The window: tokens from `_start` on are decoded; `_before` of that text is in `text`.
        self._start = 0
        self._before = self._decode(0)
        self._whole_at: list[int] = []  # places between tokens where the text was complete
        self._in_bytes = False  # within a run of byte tokens
        self._tail = ""  # text that is not certain yet, as it reads now
        self.text = ""
        self.stop_string: str | None = None

    def append(self, token_id: int) -> bool:
        """Adds one token; True if a stop string is now complete."""
        self._token_ids.append(token_id)
        if token_id in self._byte_ids:
            self._in_bytes = True
            if not self._stop_strings:
                return False  # nothing can be said before the run of bytes is over
        after = self._decode(self._start)
        if self._in_bytes and token_id not in self._byte_ids:
            # A token that is skipped does not end the run.
            self._in_bytes = after == self._decode(self._start, len(self._token_ids) - 1)
        new = after[len(self._before) :]
        known = len(self.text) + (len(self._tail) if new.startswith(self._tail) else 0)
        if self._in_bytes or after.endswith(_INCOMPLETE):
            self._tail = new.rstrip(_INCOMPLETE)
        else:
            self._tail = ""
            self.text += new
            self._move_window(after, bool(new))
        num_outputs = len(self._token_ids) - len(self._context)
        if not self._stop_strings or num_outputs <= self._min_tokens:  # BUG-C49
            return False
        return self._find_stop(known)

    def finish(self, stopped_by_token: bool) -> str:
        """The final text: that of all tokens at once, unless a stop string has cut it."""
        if self.stop_string is None:
            self.text = decode_output(
                self._tokenizer,
                self._token_ids[len(self._context) :],
                stopped_by_token,
                skip_special_tokens=self._skip_special_tokens,
                include_stop=self._include_stop,
                context=self._context,
            )
        return self.text

    def stable_text(self) -> str:
        """The part of the text that no later token or stop string can take back."""
        if self.stop_string is not None or not self._stop_strings:
            return self.text
        longest = max(len(stop) for stop in self._stop_strings) - 1
        return self.text[: max(0, len(self.text) - longest)]

    def _move_window(self, after: str, has_text: bool) -> None:
        """The text is complete here: later tokens are read behind it."""
        self._before = after
        if not has_text:
            return
        self._whole_at.append(len(self._token_ids))
        if len(self._token_ids) - self._start > _WINDOW_TOKENS and len(self._whole_at) > 3:
            # Pieces before the last ones are dropped; each of those left has text of its own.
            self._start = self._whole_at[-3]
            self._whole_at = self._whole_at[-2:]
            self._before = self._decode(self._start)

    def _decode(self, start: int, stop: int | None = None) -> str:
        ids = self._token_ids[start:stop]
        if not ids:
            return ""
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)

    def _find_stop(self, known: int) -> bool:
        text = self.text + self._tail
        first: tuple[int, str] | None = None
        for stop in self._stop_strings:
            # The match must end in new text, so it can begin at most len(stop) - 1 before it.
            place = text.find(stop, max(0, known - len(stop) + 1))
            if place >= 0 and (first is None or place < first[0]):
                first = (place, stop)
        if first is None:
            return False
        place, self.stop_string = first
        self.text = text[: place + (len(self.stop_string) if self._include_stop else 0)]
        return True
