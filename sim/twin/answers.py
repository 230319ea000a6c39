"""Made-up answers: the same request gets the same words each time, and always as many as asked."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import xxhash

from engine.core.errors import ConfigError
from engine.server.messages import GenerateRequest, PlaceLogprobs, TokenLogprob
from engine.text.tokenizer import Tokenizer
from sim.run.option_table import ANSWERS

_WORDS = (
    "time", "people", "way", "water", "day", "part", "place", "year", "work", "name", "sound",
    "line", "house", "world", "school", "paper", "story", "point", "city", "tree", "sea", "side",
    "night", "river", "car", "book", "music", "color", "group", "table", "north", "south",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What answers look like where the client leaves it open.

    In mode `echo` the prompt comes back. Without a limit of the client's, lengths are lognormal
    with that mean and coefficient of variation.
    """

    mode: str = "random"
    output_tokens_mean: float = 256.0
    output_tokens_cv: float = 0.6
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode not in ANSWERS:
            raise ConfigError("mode", self.mode, f"must be one of {', '.join(ANSWERS)}")
        if not 1 <= self.output_tokens_mean < math.inf:
            raise ConfigError("output_tokens_mean", self.output_tokens_mean, "must be at least 1")
        if not 0 <= self.output_tokens_cv < math.inf:
            raise ConfigError("output_tokens_cv", self.output_tokens_cv, "must not be negative")


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of one answer, by place: the first from `openers`, all others from `words`.

    `num_tokens` is a limit of the client's or of the model unless the last token is `end`, which
    is None then.
    """

    words: Sequence[int]
    openers: Sequence[int]
    start: int
    stride: int
    num_tokens: int
    end: int | None = None

    def token(self, place: int) -> int:
        """The token at a place, from 0."""
        if self.end is not None and place == self.num_tokens - 1:
            return self.end
        words = self.words if place else self.openers
        return words[(self.start + place * self.stride) % len(words)]

    def logprobs(self, place: int, count: int) -> PlaceLogprobs:
        """Made up as well, but a distribution: the chosen token has half of what there is."""
        return made_up_logprobs(self.token(place), self.words, count)

    def prompt_logprobs(self, request: GenerateRequest) -> list[PlaceLogprobs | None] | None:
        """Those of the prompt, where they are asked for; nothing comes before its first token."""
        count, prompt = request.prompt_logprobs, request.prompt_token_ids
        if count is None:
            return None
        return [None, *(made_up_logprobs(one, self.words, count) for one in prompt[1:])]


class AnswerMaker:
    """Makes answers; the words are tokens of their own in any text, so that they come back as the
    same ids when a client sends a conversation again.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, options: AnswerOptions) -> None:
        self._options = options
        self._words, self._openers = _words(tokenizer)
        eos = getattr(tokenizer, "eos_token_id", None)
        self.end: int = eos if isinstance(eos, int) else vocab_size - 1

    def answer(self, request: GenerateRequest, max_model_len: int) -> Answer:
        """The answer to a request."""
        options, prompt = self._options, request.prompt_token_ids
        key = xxhash.xxh64_intdigest(array("q", prompt).tobytes(), options.seed)
        key ^= request.seed or 0
        room = max_model_len - len(prompt)
        limit = room if request.max_tokens is None else min(room, request.max_tokens)
        num_tokens, end = limit, None
        is_echo = options.mode == "echo"
        if not request.ignore_eos and (is_echo or request.max_tokens is None):
            # A model would end by itself: the last token says so.
            natural = max(len(prompt) if is_echo else self._length(key), request.min_tokens) + 1
            if natural <= limit:
                num_tokens, end = natural, self.end
        if is_echo:
            return Answer(prompt, prompt[:1], 0, 1, num_tokens, end)
        start, stride = key % len(self._words), 1 + key // 1009 % (len(self._words) - 1)
        return Answer(self._words, self._openers, start, stride, num_tokens, end)

    def _length(self, key: int) -> int:
        """A length for a client that sets no limit: lognormal, the same for the same request."""
        options = self._options
        variance = math.log1p(options.output_tokens_cv**2)
        mean = math.log(options.output_tokens_mean) - variance / 2
        drawn = Random(key).lognormvariate(mean, math.sqrt(variance))
        return max(1, round(min(drawn, 1e9)))


def made_up_logprobs(token_id: int, words: Sequence[int], count: int) -> PlaceLogprobs:
    """`token_id` with half of the probability, the others with half of what is left each."""
    others = [word for word in dict.fromkeys(words) if word != token_id][: max(0, count)]
    half = math.log(0.5)
    return [
        TokenLogprob(one, half * (rank + 1), rank + 1)
        for rank, one in enumerate([token_id, *others])
    ]


def _words(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens that stand for one word with its space, and ones for a word at the beginning."""
    words = _single(tokenizer, [f" {word}" for word in _WORDS])
    openers = _single(tokenizer, [word.capitalize() for word in _WORDS])
    if len(words) < 2 or not openers:
        # A vocabulary without such words: any tokens that have a text.
        some = _single(tokenizer, [chr(code) for code in range(97, 123)]) or [0, 1]
        return some, some
    return words, openers


def _single(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int]:
    found = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return [ids[0] for ids in found if len(ids) == 1]
