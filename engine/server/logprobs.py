"""Log probabilities in the shapes of OpenAI's two endpoints and of vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Sequence

from engine.server.messages import PlaceLogprobs
from engine.text.tokenizer import Tokenizer

# JSON has no -inf; vLLM's number for it.
LEAST_LOGPROB = -9999.0


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """The text of one token by itself."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    try:
        return tokenizer.decode([token_id], skip_special_tokens=False)
    except Exception:  # a tokenizer is foreign code
        return f"token_id:{token_id}"


class CompletionLogprobs:
    """Columns over the tokens of one choice; a stream goes on where its last part ended."""

    def __init__(self, tokenizer: Tokenizer | None, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._offset = 0

    def part(
        self, token_ids: Sequence[int], places: Sequence[PlaceLogprobs | None]
    ) -> dict[str, object]:
        """The next tokens."""
        tokens: list[str] = []
        chosen: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, place in zip(token_ids, places, strict=True):
            text = token_text(self._tokenizer, token_id)
            tokens.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
            chosen.append(None if place is None else _finite(place[0].logprob))
            top.append(None if place is None else self._top(place))
        return {
            "text_offset": offsets,
            "token_logprobs": chosen,
            "tokens": tokens,
            "top_logprobs": top,
        }

    def _top(self, place: PlaceLogprobs) -> dict[str, float]:
        return {
            token_text(self._tokenizer, one.token_id): _finite(one.logprob)
            for one in place[: self._num_top + 1]
        }


def chat_logprobs(
    tokenizer: Tokenizer | None, places: Sequence[PlaceLogprobs], num_top: int
) -> dict[str, object]:
    """The tokens of a message or of a part of one."""

    def entry(token_id: int, logprob: float) -> dict[str, object]:
        text = token_text(tokenizer, token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}

    content = []
    for place in places:
        likeliest = sorted(place, key=lambda one: one.rank)[:num_top]
        content.append(
            {
                **entry(place[0].token_id, place[0].logprob),
                "top_logprobs": [entry(one.token_id, one.logprob) for one in likeliest],
            }
        )
    return {"content": content}


def prompt_logprobs_json(
    tokenizer: Tokenizer | None, places: Sequence[PlaceLogprobs | None] | None
) -> list[dict[str, object] | None] | None:
    """vLLM's `prompt_logprobs`: by token id, None for the first token."""
    if places is None:
        return None
    return [
        None
        if place is None
        else {
            str(one.token_id): {
                "logprob": _finite(one.logprob),
                "rank": one.rank,
                "decoded_token": token_text(tokenizer, one.token_id),
            }
            for one in place
        }
        for place in places
    ]


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
