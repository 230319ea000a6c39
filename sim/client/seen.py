"""What a client saw of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

NS_PER_S = 1_000_000_000


@dataclass(slots=True)
class Seen:
    """What came of one request; times in ns of `time.perf_counter_ns`.

    `token_ns` has one time per event that brought tokens; `output_tokens` is what the server
    counted.
    """

    row: int
    due_ns: int
    start_ns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    token_ns: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it was answered to its end."""
        return self.error is None and bool(self.token_ns)


def gaps_s(times_ns: Sequence[int]) -> list[float]:
    """Seconds between neighbouring times."""
    return [(after - before) / NS_PER_S for before, after in pairwise(times_ns)]
