"""The text of one choice as its deltas come: detokenised, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.server.messages import Delta, PlaceLogprobs
from engine.text.detokenize import IncrementalDetokenizer, prompt_context
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextRules:
    """How the ids of a call become text."""

    tokenizer: Tokenizer | None
    byte_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    min_tokens: int = 0
    skip_special_tokens: bool = True
    include_stop: bool = False


@dataclass(slots=True)
class Piece:
    """What some deltas add to a choice."""

    text: str
    token_ids: list[int]
    logprobs: list[PlaceLogprobs] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    is_cut: bool = False  # a stop string ended it, which the body does not know

    def extend(self, later: Piece) -> None:
        """Adds the piece that came next."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *later.logprobs]
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.error, self.is_cut = later.error, later.is_cut


class ChoiceText:
    """Follows one choice; `feed` takes what came and gives what can be shown of it."""

    def __init__(self, rules: TextRules, prompt_token_ids: Sequence[int]) -> None:
        self._text: IncrementalDetokenizer | None = None
        self._shown = 0
        self.num_tokens = 0
        if rules.tokenizer is not None:
            context = prompt_context(
                rules.tokenizer, prompt_token_ids, rules.byte_ids, rules.skip_special_tokens
            )
            self._text = IncrementalDetokenizer(
                rules.tokenizer,
                rules.stops,
                min_tokens=rules.min_tokens,
                skip_special_tokens=rules.skip_special_tokens,
                include_stop=rules.include_stop,
                context=context,
                byte_ids=rules.byte_ids,
            )

    def feed(self, deltas: Sequence[Delta]) -> Piece:
        """Takes deltas in their order."""
        piece = Piece("", [], None)
        for delta in deltas:
            if delta.logprobs is not None:
                piece.logprobs = [*(piece.logprobs or []), *delta.logprobs]
            for token_id in delta.token_ids:
                piece.token_ids.append(token_id)
                if self._text is not None and self._text.append(token_id):
                    self._cut(piece)
                    break
            if piece.is_cut:
                break
            if delta.finish_reason is not None:
                piece.finish_reason = delta.finish_reason
                piece.stop_reason = delta.stop_reason
                piece.error = delta.error
        self.num_tokens += len(piece.token_ids)
        piece.text = self._new_text(piece)
        return piece

    def _cut(self, piece: Piece) -> None:
        assert self._text is not None
        piece.is_cut = True
        piece.finish_reason = "stop"
        piece.stop_reason = self._text.stop_string
        if piece.logprobs is not None:
            del piece.logprobs[len(piece.token_ids) :]

    def _new_text(self, piece: Piece) -> str:
        if self._text is None:
            return ""
        if piece.finish_reason is None:
            text = self._text.stable_text()
        else:
            by_token = piece.finish_reason == "stop" and not piece.is_cut
            text = self._text.finish(by_token)
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new
