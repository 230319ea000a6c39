"""A request: what the user asked for, as far as scheduling needs to know it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.tokens import Prompt

RequestId = int | str


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    `stop_token_ids` holds every id that ends the output (EOS ids too, unless they are ignored);
    they count only from output `min_tokens + 1` on. `extra_keys` are typed pairs such as
    `("salt", "x")` or `("adapter", "x")` that separate prefix caches (LAW-K2).

    Only the policy `priority` looks at `priority` (lower goes first) and at `arrival`, the moment
    of arrival by any clock of the caller's: requests of one moment count as one arrival, and
    without it each request arrives after those added before it.
    """

    request_id: RequestId
    prompt: Prompt
    max_tokens: int
    stop_token_ids: frozenset[int] = field(default=frozenset())
    min_tokens: int = 0
    extra_keys: tuple[tuple[str, str], ...] = ()
    priority: int = 0
    arrival: int | None = None
