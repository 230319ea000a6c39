"""Per-request sampling parameters, validated when they are made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.errors import ConfigError
from engine.options import require_int

# Below this a division by the temperature would overflow, so the request is greedy.
GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    `temperature=0` is greedy. `top_k=0` and `top_k=-1` keep every token, `max_tokens=None` runs
    to `max_model_len`. The order of the filters is temperature, top-k, top-p, min-p. With `seed`
    the random numbers of a request depend on nothing else that runs; its logits still differ in
    their last bits with the shape of the batch (docs/numerics.md), which can turn a close draw.
    `stop` holds strings that are cut from the text; `stop_token_ids` end the output and stay in
    `token_ids`. Before `min_tokens` outputs no stop rule counts and the stop ids cannot be drawn.
    `logprobs` and `prompt_logprobs` ask for that many of the likeliest tokens at each place, and
    the token that stands there; with the latter the prompt is computed whole, without prefix hits.

    Raises:
        ConfigError: a value is impossible.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        self._normalise_stops()
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "include_stop_str_in_output",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, getattr(self, name), "must be True or False")
        if self.stop and not self.detokenize:
            raise ConfigError("detokenize", False, "must be True when stop strings are given")

    def _check_numbers(self) -> None:
        _require_within("temperature", self.temperature, 0.0, None)
        _require_within("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise ConfigError("top_p", self.top_p, "must be above 0 and at most 1")
        _require_within("min_p", self.min_p, 0.0, 1.0)
        require_int("top_k", self.top_k, -1)
        if self.max_tokens is not None:
            require_int("max_tokens", self.max_tokens, 1)  # BUG-B19
        require_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            limit = f"must be at most max_tokens={self.max_tokens}"
            raise ConfigError("min_tokens", self.min_tokens, limit)
        if self.seed is not None:
            require_int("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), 0, 20)

    def _normalise_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ConfigError("stop", text, "must be non-empty strings")
        ids = tuple(self.stop_token_ids)
        for token_id in ids:
            require_int("stop_token_ids", token_id, 0)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings in the order given."""
        return tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def filters_tokens(self) -> bool:
        """True if top-k, top-p or min-p can remove a token that temperature would allow."""
        if self.is_greedy:
            return False
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """What the runners must know to sample for one request."""

    params: SamplingParams
    seed: int
    prompt_len: int
    stop_token_ids: frozenset[int]

    @property
    def is_special(self) -> bool:
        """True if more is asked for than tokens that temperature and seed decide."""
        params = self.params
        asks = params.logprobs is not None or params.prompt_logprobs is not None
        return asks or params.filters_tokens or self.bans_tokens

    @property
    def bans_tokens(self) -> bool:
        """True if some ids must not be drawn at first."""
        return self.params.min_tokens > 0 and bool(self.stop_token_ids)


def _require_within(option: str, value: object, least: float, most: float | None) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError(option, value, "must be a finite number")
    if value < least:
        raise ConfigError(option, value, f"must be at least {least}")
    if most is not None and value > most:
        raise ConfigError(option, value, f"must be at most {most}")


def request_seed(params: SamplingParams, engine_seed: int, number: int) -> int:
    """The seed of one request: its own, or one made from the engine's seed and its number."""
    if params.seed is not None:
        return params.seed
    # SplitMix64: neighbouring numbers give unrelated seeds.
    word = (engine_seed * 0x9E3779B97F4A7C15 + (number + 1) * 0xD1B54A32D192ED03) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return (word ^ (word >> 31)) >> 1


_WORD = (1 << 64) - 1
